// Totals of one domain group since it was opened; written by its worker thread, read by any.

#ifndef PDSERVE_FABRIC_FABRIC_COUNTERS_H_
#define PDSERVE_FABRIC_FABRIC_COUNTERS_H_

#include <atomic>
#include <cstdint>
#include <vector>

namespace pdserve::fabric {

struct FabricCounters {
  explicit FabricCounters(size_t num_nics) : bytes_posted_by_nic(num_nics) {}

  std::vector<std::atomic<uint64_t>> bytes_posted_by_nic;
  std::atomic<uint64_t> num_writes_posted{0};
  std::atomic<uint64_t> num_writes_completed{0};
  std::atomic<uint64_t> num_writes_failed{0};
  std::atomic<uint64_t> num_immediates_received{0};
  std::atomic<uint64_t> num_stale_immediates{0};
  std::atomic<uint64_t> num_in_flight{0};     // Now.
  std::atomic<uint64_t> num_armed_pushes{0};  // Now.
};

}  // namespace pdserve::fabric

#endif  // PDSERVE_FABRIC_FABRIC_COUNTERS_H_
