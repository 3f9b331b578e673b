// Which NICs a write goes over: the one rule that spreads the writes of a push.
//
// There are as many pairs as the side with more NICs has; NIC p of one side goes with NIC p, modulo its number, of the
// other. Write i of a layer goes over pair i, modulo the number of pairs: so the NICs of the side with more are used
// evenly, and those of the other to within one write in the number of pairs.

#ifndef PDSERVE_FABRIC_STRIPING_H_
#define PDSERVE_FABRIC_STRIPING_H_

#include <algorithm>
#include <cstdint>

namespace pdserve::fabric {

struct NicPair {
  uint32_t local;   // Index into the domain group's NICs.
  uint32_t remote;  // Index into RegionDescriptor::nics.
};

struct Striping {
  // Both positive.
  uint32_t num_local;
  uint32_t num_remote;

  uint32_t num_pairs() const { return std::max(num_local, num_remote); }
  NicPair PairOf(uint64_t write_index) const {
    const uint32_t pair = static_cast<uint32_t>(write_index % num_pairs());
    return {pair % num_local, pair % num_remote};
  }
};

// Where a push of a single write, `push_id`, begins: scattered, so that pushes whose ids have a stride share all NICs.
inline uint64_t FirstPairOfSingleWrite(uint64_t push_id) { return (push_id * 0x9E3779B97F4A7C15) >> 32; }

}  // namespace pdserve::fabric

#endif  // PDSERVE_FABRIC_STRIPING_H_
