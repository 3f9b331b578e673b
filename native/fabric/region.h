// Memory that takes part in writes: ours as a source, ours as a target under a key, a peer's as a target.
//
// Thread safety: LocalRegion and RemoteRegion do not change after construction, and may be read by any thread.
//
// Invariants:
//   1. Slices ascend, and cover [0, num_bytes) without gaps or overlap.
//   2. No write is handed to libfabric unless both its ends lie inside a slice of a region: providers do not check
//      (shm 1.17 writes to any address; tcp reports success for a bad key).

#ifndef PDSERVE_FABRIC_REGION_H_
#define PDSERVE_FABRIC_REGION_H_

#include <cstdint>
#include <vector>

#include "fabric/status.h"

namespace pdserve::fabric {

// A NIC's registration can't be larger on some providers; one slice is one registration.
inline constexpr uint64_t kMaxSliceBytes = uint64_t{4} << 30;

struct SliceRange {
  uint64_t start;
  uint64_t num_bytes;
};

// [0, num_bytes) cut into slices of at most `max_slice_bytes`.
// REQUIRES: both are positive.
std::vector<SliceRange> CutIntoSlices(uint64_t num_bytes, uint64_t max_slice_bytes);

// One registration as a peer addresses it: byte `offset` of the region is at `base + offset - start` under `key`.
struct RemoteSlice {
  uint64_t start;
  uint64_t num_bytes;
  uint64_t base;
  uint64_t key;
};

struct RegionDescriptor {
  uint64_t num_bytes;
  std::vector<RemoteSlice> slices;
};

class LocalRegion {
 public:
  struct Slice {
    SliceRange range;
    void* descriptor;  // libfabric's local descriptor; null where the provider needs none.
  };

  LocalRegion(char* address, uint64_t num_bytes, std::vector<Slice> slices)
      : address_(address), num_bytes_(num_bytes), slices_(std::move(slices)) {}

  char* address() const { return address_; }
  uint64_t num_bytes() const { return num_bytes_; }
  // The slice that holds byte `offset`.
  // REQUIRES: offset < num_bytes().
  const Slice& SliceAt(uint64_t offset) const;

 private:
  char* address_;
  uint64_t num_bytes_;
  std::vector<Slice> slices_;
};

class RemoteRegion {
 public:
  // Invalid when the descriptor breaks invariant 1 or an address would wrap around.
  static Status Validate(const RegionDescriptor& descriptor);

  // REQUIRES: Validate(descriptor).ok().
  RemoteRegion(uint32_t peer_id, RegionDescriptor descriptor) : peer_id_(peer_id), descriptor_(std::move(descriptor)) {}

  uint32_t peer_id() const { return peer_id_; }
  uint64_t num_bytes() const { return descriptor_.num_bytes; }
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

// The longest piece that starts at the two offsets, of at most `num_bytes`.
// REQUIRES: [offset, offset + num_bytes) is inside the region, on both sides; num_bytes > 0.
Piece FirstPiece(const LocalRegion& source, uint64_t source_offset, const RemoteRegion& target, uint64_t target_offset,
                 uint64_t num_bytes);

}  // namespace pdserve::fabric

#endif  // PDSERVE_FABRIC_REGION_H_
