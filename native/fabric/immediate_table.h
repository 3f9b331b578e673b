// Counts the immediates that arrive, and says when as many came as were expected.
//
// An immediate is a slot (20 bits) and a generation (12 bits). Whoever gives immediates out raises the generation each
// time it uses a slot again, so a late write of an earlier handoff is told from one of the present.
//
// Thread safety: all; the worker threads of all domain groups count while another thread expects and forgets.
//
// Invariants:
//   1. A counter is made by the first arrival or by Expect, whichever comes first; no arrival is lost in between.
//   2. A generation that was forgotten, and every one before it (in 12-bit serial order), counts nothing any more.
//   3. An expectation ends once: landed or expired.
//   4. The instants of a counter never decrease, though several threads read the clock before they count: one that
//      counts after another says what the other said at the least.
//   5. At most kMaxCounters counters, of which at most kMaxUnexpected were made by arrivals alone: a peer that writes
//      immediates it was never given fills no memory.

#ifndef PDSERVE_FABRIC_IMMEDIATE_TABLE_H_
#define PDSERVE_FABRIC_IMMEDIATE_TABLE_H_

#include <atomic>
#include <cstdint>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "fabric/event_queue.h"
#include "fabric/status.h"

namespace pdserve::fabric {

inline constexpr uint32_t kGenerationBits = 12;
inline constexpr uint32_t kNumGenerations = 1u << kGenerationBits;

class ImmediateTable {
 public:
  static constexpr size_t kMaxCounters = 65536;
  static constexpr size_t kMaxUnexpected = 4096;

  struct Expectation {
    uint32_t immediate;
    uint32_t num_writes;
    int64_t deadline_ns;
    bool record_arrivals;
  };

  // Landed goes to `events`, which outlives the table.
  explicit ImmediateTable(EventQueue* events) : events_(events) {}

  // One arrival for each element, all at `now_ns`. Returns how many were stale or over the bound, and dropped.
  uint64_t Arrive(std::span<const uint32_t> immediates, int64_t now_ns);

  // Invalid when the immediate is expected already or its generation is closed; Capacity when the table is full.
  Status Expect(const Expectation& expectation);

  // Closes the immediate's generation; without effect on one that is closed already.
  void Forget(uint32_t immediate);

  // Ends the expectations whose deadline is at or before `now_ns`. Takes no lock while there is none.
  void Expire(int64_t now_ns);

 private:
  struct Counter {
    uint32_t num_arrived = 0;
    int64_t first_ns = 0;
    int64_t last_ns = 0;
    std::optional<Expectation> expectation;  // Until it ends.
    std::vector<int64_t> arrivals_ns;
    bool made_by_arrival = false;
  };

  // All below REQUIRE mutex_.
  bool IsClosed(uint32_t immediate) const;
  bool ArriveOne(uint32_t immediate, int64_t now_ns);
  void LandIfComplete(uint32_t immediate, Counter& counter);
  void EndExpectation(Counter& counter);
  void NoteEarliestDeadline();

  EventQueue* const events_;
  std::mutex mutex_;
  std::unordered_map<uint32_t, Counter> counters_;             // By immediate.
  std::unordered_map<uint32_t, uint32_t> closed_generations_;  // By slot: the last generation that was forgotten.
  std::set<std::pair<int64_t, uint32_t>> deadlines_;           // Of open expectations, with their immediate.
  size_t num_unexpected_ = 0;
  std::atomic<int64_t> earliest_deadline_ns_{INT64_MAX};  // The first of deadlines_.
};

}  // namespace pdserve::fabric

#endif  // PDSERVE_FABRIC_IMMEDIATE_TABLE_H_
