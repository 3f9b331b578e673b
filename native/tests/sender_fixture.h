// A sender on a port that does what the test says: refusals, failures, completions in any order.

#ifndef PDSERVE_TESTS_SENDER_FIXTURE_H_
#define PDSERVE_TESTS_SENDER_FIXTURE_H_

#include <cerrno>
#include <deque>
#include <memory>
#include <vector>

#include "fabric/sender.h"
#include "tests/check.h"

namespace pdserve::fabric {

inline constexpr uint64_t kRegionBytes = 1 << 20;
inline constexpr uint64_t kPageBytes = 1024;

class ScriptedPort final : public WritePort {
 public:
  Status OpenRoute(uint32_t local_nic, std::span<const uint8_t> address, PeerRoute* route) override {
    if (open_error != 0) return Status::Failed("fi_endpoint", open_error);
    *route = {.local_nic = local_nic, .endpoint = nullptr, .address = address[0]};
    ++num_open;
    return Status::Ok();
  }
  void CloseRoute(const PeerRoute&) override { --num_open; }
  int Write(const WriteRequest& request) override {
    if (next_error != 0) return next_error;
    if (num_accepted_before_refusal == 0) return EAGAIN;
    --num_accepted_before_refusal;
    in_flight.push_back(request);
    return 0;
  }

  int next_error = 0;
  size_t num_accepted_before_refusal = SIZE_MAX;
  int open_error = 0;
  int num_open = 0;
  std::deque<WriteRequest> in_flight;
};

// A group of `num_local` NICs, and two peers of four NICs each, whose address is their place.
struct Fixture {
  explicit Fixture(bool reorders_writes = false, uint64_t slice_bytes = kRegionBytes, uint32_t num_local = 1)
      : source(RegionOf(slice_bytes, kRegionBytes, num_local)),
        zero_word(RegionOf(kFlushWordBytes, kFlushWordBytes, num_local)),
        counters(num_local),
        sender(&port, &events, &counters, zero_word.get(), reorders_writes,
               [this](uint32_t peer_id, int) { failed_peers.push_back(peer_id); }) {
    sender.AddPeer(1, {{0}, {1}, {2}, {3}});
    sender.AddPeer(2, {{0}, {1}, {2}, {3}});
  }

  std::shared_ptr<const LocalRegion> RegionOf(uint64_t slice_bytes, uint64_t num_bytes, uint32_t num_nics) {
    std::vector<LocalRegion::Slice> slices;
    for (const SliceRange& range : CutIntoSlices(num_bytes, slice_bytes)) {
      slices.push_back({range, std::vector<void*>(num_nics)});
    }
    return std::make_shared<const LocalRegion>(Memory{memory.data(), num_bytes}, slices);
  }

  // A region of the peer with a key, 10 + nic, for each of `nics`.
  std::shared_ptr<const RemoteRegion> TargetOf(uint32_t peer_id, const std::vector<uint32_t>& nics) {
    RemoteSlice slice = {0, kRegionBytes, 0, {}};
    for (const uint32_t nic : nics) slice.keys.push_back(10 + nic);
    return std::make_shared<const RemoteRegion>(
        peer_id, RegionDescriptor{.num_bytes = kRegionBytes, .nics = nics, .slices = {slice}});
  }

  void Arm(uint64_t push_id, uint32_t num_pages, uint32_t peer_id = 1, uint32_t num_layers = 1, uint64_t due_tick = 0,
           const std::vector<uint32_t>& nics = {0}) {
    const auto target = TargetOf(peer_id, nics);
    CHECK(sender.OpenRoutes(peer_id, *source, *target).ok());
    std::vector<uint32_t> pages(num_pages);
    for (uint32_t page = 0; page < num_pages; ++page) pages[page] = page;
    sender.Arm({.push_id = push_id,
                .peer_id = peer_id,
                .immediate = 5,
                .source = source,
                .target = target,
                .source_pages = {pages, 0, kPageBytes, kPageBytes},
                .target_pages = {pages, 0, kPageBytes, kPageBytes},
                .num_layers = num_layers,
                .run_bytes = kPageBytes,
                .first_due_tick = due_tick});
  }

  void Flush(uint64_t flush_id, int64_t deadline_ns = INT64_MAX,
             const std::vector<std::vector<uint32_t>>& nics_of_targets = {{0}}) {
    std::vector<std::shared_ptr<const RemoteRegion>> targets;
    for (const std::vector<uint32_t>& nics : nics_of_targets) targets.push_back(TargetOf(1, nics));
    sender.BeginFlush({std::make_shared<FlushParts>(flush_id, 1, &events), 1, targets, deadline_ns});
  }

  void Advance(int64_t now_ns = 1) { sender.Advance(&*counter, now_ns); }

  void CompleteOldest(int error = 0) {
    const WriteRequest request = port.in_flight.front();
    port.in_flight.pop_front();
    sender.WriteEnded(request.context, error, 2);
  }

  void CompleteAll() {
    while (!port.in_flight.empty()) CompleteOldest();
  }

  template <typename Kind>
  Kind OneEvent() {
    std::vector<Event> drained = events.Drain();
    CHECK(drained.size() == 1);
    return std::get<Kind>(drained[0]);
  }

  std::vector<char> memory = std::vector<char>(kRegionBytes);
  std::unique_ptr<LayerCounter> counter = std::make_unique<LayerCounter>();
  std::shared_ptr<const LocalRegion> source, zero_word;
  ScriptedPort port;
  EventQueue events;
  FabricCounters counters;
  std::vector<uint32_t> failed_peers;
  Sender sender;
};

}  // namespace pdserve::fabric

#endif  // PDSERVE_TESTS_SENDER_FIXTURE_H_
