#include "fabric/region.h"

#include <algorithm>
#include <memory>
#include <vector>

#include "fabric/page_push.h"
#include "tests/check.h"

namespace pdserve::fabric {
namespace {

// Of a region with `num_nics` NICs: nic 0, 1, ...
RegionDescriptor DescriptorOf(std::vector<SliceRange> ranges, uint32_t num_nics = 1) {
  RegionDescriptor descriptor;
  for (uint32_t nic = 0; nic < num_nics; ++nic) descriptor.nics.push_back(nic);
  for (const SliceRange& range : ranges) {
    RemoteSlice slice = {range.start, range.num_bytes, 1000 * range.start, {}};
    for (uint32_t nic = 0; nic < num_nics; ++nic) slice.keys.push_back(100 * nic + range.start + 1);
    descriptor.slices.push_back(slice);
    descriptor.num_bytes = range.start + range.num_bytes;
  }
  return descriptor;
}

std::shared_ptr<const LocalRegion> Source(char* address, uint64_t num_bytes, uint64_t slice_bytes,
                                          std::vector<void*> descriptors = {nullptr}) {
  std::vector<LocalRegion::Slice> slices;
  for (const SliceRange& range : CutIntoSlices(num_bytes, slice_bytes)) slices.push_back({range, descriptors});
  return std::make_shared<const LocalRegion>(Memory{address, num_bytes}, slices);
}

PushSpec SpecOf(uint64_t source_bytes, uint64_t target_bytes) {
  return {.push_id = 1,
          .peer_id = 1,
          .immediate = 1,
          .source = Source(nullptr, source_bytes, source_bytes),
          .target = std::make_shared<const RemoteRegion>(1, DescriptorOf({{0, target_bytes}})),
          .source_pages = {{0, 2}, 0, 10, 100},
          .target_pages = {{1, 0}, 0, 10, 100},
          .num_layers = 2,
          .run_bytes = 10,
          .first_due_tick = 1};
}

void SlicesCoverWithoutGaps() {
  const std::vector<SliceRange> slices = CutIntoSlices(10, 4);
  CHECK(slices.size() == 3);
  CHECK(slices[0].start == 0 && slices[1].start == 4 && slices[2].start == 8 && slices[2].num_bytes == 2);
  CHECK(CutIntoSlices(8, 4).size() == 2);
}

void DescriptorsWithGapsOverlapOrWrapAroundAreInvalid() {
  CHECK(RemoteRegion::Validate(DescriptorOf({{0, 4}, {4, 6}}), 1).ok());
  CHECK(!RemoteRegion::Validate(DescriptorOf({{0, 4}, {5, 6}}), 1).ok());
  CHECK(!RemoteRegion::Validate(DescriptorOf({{0, 4}, {3, 6}}), 1).ok());
  CHECK(!RemoteRegion::Validate(DescriptorOf({}), 1).ok());
  CHECK(!RemoteRegion::Validate({.num_bytes = 8, .nics = {0}, .slices = {{0, 8, UINT64_MAX - 3, {1}}}}, 1).ok());
  CHECK(!RemoteRegion::Validate({.num_bytes = 8, .nics = {0}, .slices = {{0, 4, 0, {1}}}}, 1).ok());
}

void DescriptorsWithNicsOrKeysThatDoNotFitAreInvalid() {
  const RegionDescriptor good = DescriptorOf({{0, 4}, {4, 6}}, 2);
  CHECK(RemoteRegion::Validate(good, 2).ok());
  CHECK(!RemoteRegion::Validate(good, 1).ok());
  for (const std::vector<uint32_t>& nics : std::vector<std::vector<uint32_t>>{{}, {0}, {1, 1}, {0, UINT32_MAX}}) {
    RegionDescriptor bad = good;
    bad.nics = nics;
    CHECK(!RemoteRegion::Validate(bad, 2).ok());
  }
  RegionDescriptor bad = good;
  bad.slices[1].keys.pop_back();
  CHECK(!RemoteRegion::Validate(bad, 2).ok());
}

void PairsUseTheNicsOfTheLargerSideEvenly() {
  for (uint32_t num_local = 1; num_local <= 4; ++num_local) {
    for (uint32_t num_remote = 1; num_remote <= 4; ++num_remote) {
      const Striping striping = {num_local, num_remote};
      std::vector<int> local(num_local), remote(num_remote);
      for (uint32_t write = 0; write < 12 * striping.num_pairs(); ++write) {
        const NicPair pair = striping.PairOf(write);
        CHECK(pair.local == write % striping.num_pairs() % num_local);
        ++local.at(pair.local);
        ++remote.at(pair.remote);
      }
      const std::vector<int>& larger = num_local > num_remote ? local : remote;
      CHECK(std::count(larger.begin(), larger.end(), 12) == static_cast<int64_t>(larger.size()));
      CHECK(*std::min_element(local.begin(), local.end()) >= 12);
      CHECK(*std::min_element(remote.begin(), remote.end()) >= 12);
    }
  }
}

void PiecesHaveTheDescriptorAndKeyOfTheirPair() {
  std::vector<char> bytes(100);
  int first, second;
  const auto source = Source(bytes.data(), 100, 100, {&first, &second});
  const RemoteRegion target(1, DescriptorOf({{0, 100}}, 3));
  const Piece piece = FirstPiece(*source, 0, target, 0, {.local = 1, .remote = 2}, 10);
  CHECK(piece.source_descriptor == &second && piece.target_key == 201);
  CHECK(FirstPiece(*source, 0, target, 0, {0, 0}, 10).source_descriptor == &first);
}

void PushesUpToTheLastByteAreValidAndOneBeyondAreNot() {
  CHECK(SpecOf(130, 120).Validate().ok());
  CHECK(!SpecOf(129, 120).Validate().ok());
  CHECK(!SpecOf(130, 119).Validate().ok());
}

void PushesThatWrapAroundAreInvalid() {
  PushSpec spec = SpecOf(130, 120);
  spec.target_pages.page_bytes = uint64_t{1} << 63;
  spec.target_pages.pages = {2, 2};
  CHECK(!spec.Validate().ok());
  spec = SpecOf(130, 120);
  spec.source_pages.offset = UINT64_MAX;
  CHECK(!spec.Validate().ok());
  spec = SpecOf(130, 120);
  spec.run_bytes = UINT64_MAX;
  CHECK(!spec.Validate().ok());
}

void PushesToAnotherPeersRegionAreInvalid() {
  PushSpec spec = SpecOf(130, 120);
  spec.peer_id = 2;
  CHECK(!spec.Validate().ok());
}

void PiecesEndWhereASliceOfEitherSideEnds() {
  std::vector<char> bytes(100);
  const auto source = Source(bytes.data(), 100, 40);
  const RemoteRegion target(1, DescriptorOf({{0, 30}, {30, 70}}));
  const Piece first = FirstPiece(*source, 35, target, 20, {0, 0}, 25);
  CHECK(first.num_bytes == 5 && first.source == bytes.data() + 35);
  CHECK(first.target_address == 20 && first.target_key == 1);
  const Piece second = FirstPiece(*source, 40, target, 25, {0, 0}, 20);
  CHECK(second.num_bytes == 5);
  const Piece third = FirstPiece(*source, 45, target, 30, {0, 0}, 15);
  CHECK(third.num_bytes == 15 && third.target_address == 30000 && third.target_key == 31);
}

}  // namespace
}  // namespace pdserve::fabric

int main() {
  using namespace pdserve::fabric;
  RUN(SlicesCoverWithoutGaps);
  RUN(DescriptorsWithGapsOverlapOrWrapAroundAreInvalid);
  RUN(DescriptorsWithNicsOrKeysThatDoNotFitAreInvalid);
  RUN(PairsUseTheNicsOfTheLargerSideEvenly);
  RUN(PiecesHaveTheDescriptorAndKeyOfTheirPair);
  RUN(PushesUpToTheLastByteAreValidAndOneBeyondAreNot);
  RUN(PushesThatWrapAroundAreInvalid);
  RUN(PushesToAnotherPeersRegionAreInvalid);
  RUN(PiecesEndWhereASliceOfEitherSideEnds);
}
