// Memory that takes part in writes: ours as a source, ours as a target under a key, a peer's as a target.
//
// Thread safety: LocalRegion and RemoteRegion do not change after construction, and may be read by any thread.
//
// Invariants:
//   1. Slices ascend, and cover [0, num_bytes) without gaps or overlap.
//   2. A remote region has at least one NIC, each of its NICs once, and one key for each NIC in each slice.
//   3. No write is handed to libfabric unless both its ends lie inside a slice of a region: providers do not check
//      (shm 1.17 writes to any address; tcp reports success for a bad key).

#ifndef PDSERVE_FABRIC_REGION_H_
#define PDSERVE_FABRIC_REGION_H_

#include <cstdint>
#include <optional>
#include <vector>

#include "fabric/status.h"
#include "fabric/striping.h"

namespace pdserve::fabric {

// A NIC's registration can't be larger on some providers; one slice is one registration.
inline constexpr uint64_t kMaxSliceBytes = uint64_t{4} << 30;

// Bytes to register. The address of a GPU's is for arithmetic and for libfabric: no core may read or write there.
struct Memory {
  char* address;
  uint64_t num_bytes;
  std::optional<int> cuda_device = std::nullopt;  // CUDA's ordinal; none: the host's memory.
};

struct SliceRange {
  uint64_t start;
  uint64_t num_bytes;
};

// [0, num_bytes) cut into slices of at most `max_slice_bytes`.
// REQUIRES: both are positive.
std::vector<SliceRange> CutIntoSlices(uint64_t num_bytes, uint64_t max_slice_bytes);

// A slice as a peer addresses it: byte `offset` of the region is at `base + offset - start`, under the key of the NIC.
struct RemoteSlice {
  uint64_t start;
  uint64_t num_bytes;
  uint64_t base;
  std::vector<uint64_t> keys;  // By NIC, as in RegionDescriptor::nics.
};

struct RegionDescriptor {
  uint64_t num_bytes = 0;
  std::vector<uint32_t> nics;  // Those of its owner that write to it, by their place in its address.
  std::vector<RemoteSlice> slices;
};

class LocalRegion {
 public:
  struct Slice {
    SliceRange range;
    std::vector<void*> descriptors;  // libfabric's, by NIC of the group; null where the provider needs none.
  };

  // REQUIRES: at least one slice, and as many descriptors in each, at least one.
  LocalRegion(const Memory& memory, std::vector<Slice> slices) : memory_(memory), slices_(std::move(slices)) {}

  const Memory& memory() const { return memory_; }
  uint64_t num_bytes() const { return memory_.num_bytes; }
  uint32_t num_nics() const { return static_cast<uint32_t>(slices_.front().descriptors.size()); }
  // The slice that holds byte `offset`.
  // REQUIRES: offset < num_bytes().
  const Slice& SliceAt(uint64_t offset) const;

 private:
  Memory memory_;
  std::vector<Slice> slices_;
};

class RemoteRegion {
 public:
  // Invalid when the descriptor breaks an invariant, an address would wrap around, or its peer has no such NIC.
  static Status Validate(const RegionDescriptor& descriptor, size_t num_peer_nics);

  // REQUIRES: Validate(descriptor, ...).ok().
  RemoteRegion(uint32_t peer_id, RegionDescriptor descriptor) : peer_id_(peer_id), descriptor_(std::move(descriptor)) {}

  uint32_t peer_id() const { return peer_id_; }
  uint64_t num_bytes() const { return descriptor_.num_bytes; }
  const std::vector<uint32_t>& nics() const { return descriptor_.nics; }
  // REQUIRES: offset < num_bytes().
  const RemoteSlice& SliceAt(uint64_t offset) const;

 private:
  uint32_t peer_id_;
  RegionDescriptor descriptor_;
};

// The part of one write that lies inside one slice on both sides.
struct Piece {
  const char* source;
  void* source_descriptor;
  uint64_t target_address;
  uint64_t target_key;
  uint64_t num_bytes;
};

// The longest piece that starts at the two offsets, of at most `num_bytes`, over one pair of NICs.
// REQUIRES: [offset, offset + num_bytes) is inside the region, on both sides; num_bytes > 0.
Piece FirstPiece(const LocalRegion& source, uint64_t source_offset, const RemoteRegion& target, uint64_t target_offset,
                 NicPair pair, uint64_t num_bytes);

}  // namespace pdserve::fabric

#endif  // PDSERVE_FABRIC_REGION_H_
