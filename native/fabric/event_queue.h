// What ended, from the worker thread to the thread that polls.
//
// Thread safety: Push from one thread or several, Drain from one; both may run at the same time.
// Bound: as long as the sum of what may be open at once (pushes, flushes, expectations, exposures), each bounded where
// it starts. So Push never waits and never drops.
//
// Invariants:
//   1. fd() is readable exactly while an event is queued (a Drain that finds nothing may follow a Push in progress).

#ifndef PDSERVE_FABRIC_EVENT_QUEUE_H_
#define PDSERVE_FABRIC_EVENT_QUEUE_H_

#include <cstdint>
#include <mutex>
#include <variant>
#include <vector>

#include "fabric/region.h"
#include "fabric/wake_fd.h"

namespace pdserve::fabric {

enum class PushOutcome { kDone, kCancelled, kFailed };

// Instants on CLOCK_MONOTONIC; 0 where the layer did not get there.
struct LayerTimes {
  int64_t computed_ns = 0;
  int64_t posted_ns = 0;
  int64_t completed_ns = 0;
};

struct PushEnded {
  uint64_t push_id;
  PushOutcome outcome;
  int error;
  std::vector<LayerTimes> layers;
};

struct FlushEnded {
  uint64_t flush_id;
  bool delivered;
  int error;
};

struct Landed {
  uint32_t immediate;
  uint32_t num_writes;
  int64_t first_ns;
  int64_t last_ns;
  std::vector<int64_t> arrivals_ns;
};

struct ExpectationExpired {
  uint32_t immediate;
  uint32_t num_arrived;
  uint32_t num_expected;
};

struct Fenced {
  RegionDescriptor exposure;
};

using Event = std::variant<PushEnded, FlushEnded, Landed, ExpectationExpired, Fenced>;

class EventQueue {
 public:
  void Push(Event event) {
    const std::lock_guard lock(mutex_);
    events_.push_back(std::move(event));
    if (events_.size() == 1) readable_.Set();
  }

  std::vector<Event> Drain() {
    const std::lock_guard lock(mutex_);
    if (!events_.empty()) readable_.Clear();
    return std::exchange(events_, {});
  }

  int fd() const { return readable_.fd(); }

 private:
  std::mutex mutex_;
  std::vector<Event> events_;  // GUARDED_BY(mutex_)
  WakeFd readable_;
};

}  // namespace pdserve::fabric

#endif  // PDSERVE_FABRIC_EVENT_QUEUE_H_
