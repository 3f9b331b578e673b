// One flush, of which each domain group does a part.
//
// Thread safety: all; the worker threads of the groups end their parts in any order.
//
// Invariants:
//   1. FlushEnded is queued once, when the last part has ended; it is delivered only if every part was.

#ifndef PDSERVE_FABRIC_FLUSH_PARTS_H_
#define PDSERVE_FABRIC_FLUSH_PARTS_H_

#include <atomic>
#include <cstdint>

#include "fabric/event_queue.h"

namespace pdserve::fabric {

class FlushParts {
 public:
  // `events` outlives the flush.
  FlushParts(uint64_t flush_id, size_t num_parts, EventQueue* events)
      : flush_id_(flush_id), events_(events), num_open_(num_parts) {}

  uint64_t flush_id() const { return flush_id_; }

  // `error` is 0 when the part was delivered. REQUIRES: called once for each part.
  void PartEnded(int error) {
    int none = 0;
    if (error != 0) first_error_.compare_exchange_strong(none, error);
    if (num_open_.fetch_sub(1) > 1) return;
    const int first_error = first_error_.load();
    events_->Push(FlushEnded{flush_id_, first_error == 0, first_error});
  }

 private:
  const uint64_t flush_id_;
  EventQueue* const events_;
  std::atomic<size_t> num_open_;
  std::atomic<int> first_error_{0};
};

}  // namespace pdserve::fabric

#endif  // PDSERVE_FABRIC_FLUSH_PARTS_H_
