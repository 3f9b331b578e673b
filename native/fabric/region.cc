#include "fabric/region.h"

#include <algorithm>
#include <string>
#include <unordered_set>

namespace pdserve::fabric {
namespace {

// The last slice that starts at or before `offset`.
template <typename Slice, typename StartOf>
const Slice& SliceHolding(const std::vector<Slice>& slices, uint64_t offset, StartOf start_of) {
  auto after = std::upper_bound(slices.begin(), slices.end(), offset,
                                [&](uint64_t value, const Slice& slice) { return value < start_of(slice); });
  return *(after - 1);
}

Status ValidateNics(const RegionDescriptor& descriptor, size_t num_peer_nics) {
  std::unordered_set<uint32_t> seen;
  for (const uint32_t nic : descriptor.nics) {
    if (nic >= num_peer_nics || !seen.insert(nic).second) {
      return Status::Invalid("attach", "NIC " + std::to_string(nic) + " is named twice or is none of the peer's " +
                                           std::to_string(num_peer_nics));
    }
  }
  if (seen.empty()) return Status::Invalid("attach", "the region names no NIC");
  for (const RemoteSlice& slice : descriptor.slices) {
    if (slice.keys.size() == descriptor.nics.size()) continue;
    return Status::Invalid("attach", "a slice has " + std::to_string(slice.keys.size()) + " keys for " +
                                         std::to_string(descriptor.nics.size()) + " NICs");
  }
  return Status::Ok();
}

}  // namespace

std::vector<SliceRange> CutIntoSlices(uint64_t num_bytes, uint64_t max_slice_bytes) {
  std::vector<SliceRange> slices;
  for (uint64_t start = 0; start < num_bytes; start += max_slice_bytes) {
    slices.push_back({start, std::min(max_slice_bytes, num_bytes - start)});
  }
  return slices;
}

const LocalRegion::Slice& LocalRegion::SliceAt(uint64_t offset) const {
  return SliceHolding(slices_, offset, [](const Slice& slice) { return slice.range.start; });
}

const RemoteSlice& RemoteRegion::SliceAt(uint64_t offset) const {
  return SliceHolding(descriptor_.slices, offset, [](const RemoteSlice& slice) { return slice.start; });
}

Status RemoteRegion::Validate(const RegionDescriptor& descriptor, size_t num_peer_nics) {
  if (Status status = ValidateNics(descriptor, num_peer_nics); !status.ok()) return status;
  uint64_t covered = 0;
  for (const RemoteSlice& slice : descriptor.slices) {
    if (slice.start != covered) {
      return Status::Invalid("attach", "slices leave a gap or overlap: one starts at " + std::to_string(slice.start) +
                                           " where " + std::to_string(covered) + " was expected");
    }
    uint64_t end_address;
    if (slice.num_bytes == 0 || __builtin_add_overflow(covered, slice.num_bytes, &covered) ||
        __builtin_add_overflow(slice.base, slice.num_bytes, &end_address)) {
      return Status::Invalid("attach", "a slice is empty or ends beyond the address space");
    }
  }
  if (covered != descriptor.num_bytes || covered == 0) {
    return Status::Invalid("attach", "slices cover " + std::to_string(covered) + " bytes of a region of " +
                                         std::to_string(descriptor.num_bytes));
  }
  return Status::Ok();
}

Piece FirstPiece(const LocalRegion& source, uint64_t source_offset, const RemoteRegion& target, uint64_t target_offset,
                 NicPair pair, uint64_t num_bytes) {
  const LocalRegion::Slice& source_slice = source.SliceAt(source_offset);
  const RemoteSlice& target_slice = target.SliceAt(target_offset);
  const uint64_t source_left = source_slice.range.start + source_slice.range.num_bytes - source_offset;
  const uint64_t target_left = target_slice.start + target_slice.num_bytes - target_offset;
  return {.source = source.memory().address + source_offset,
          .source_descriptor = source_slice.descriptors[pair.local],
          .target_address = target_slice.base + (target_offset - target_slice.start),
          .target_key = target_slice.keys[pair.remote],
          .num_bytes = std::min({num_bytes, source_left, target_left})};
}

}  // namespace pdserve::fabric
