// The sender against a port that does what the test says: refusals, failures, completions in any order.

#include "fabric/sender.h"

#include <algorithm>
#include <deque>
#include <memory>
#include <vector>

#include "tests/check.h"

namespace pdserve::fabric {
namespace {

constexpr uint64_t kRegionBytes = 1 << 20;
constexpr uint64_t kPageBytes = 1024;

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
    return std::make_shared<const LocalRegion>(memory.data(), num_bytes, slices);
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

void WindowBoundsWritesInFlight() {
  Fixture fixture;
  fixture.Arm(1, 200);
  fixture.Advance();
  CHECK(fixture.port.in_flight.size() == kWindowWrites);
  fixture.CompleteOldest();
  fixture.Advance();
  CHECK(fixture.port.in_flight.size() == kWindowWrites);
  while (!fixture.port.in_flight.empty()) {
    fixture.CompleteOldest();
    fixture.Advance();
  }
  CHECK(fixture.OneEvent<PushEnded>().outcome == PushOutcome::kDone);
  CHECK(fixture.counters.num_writes_completed == 200);
}

void LayersArePostedAsTheCounterRises() {
  Fixture fixture;
  fixture.Arm(1, 3, 1, 2, 1);
  fixture.Advance();
  CHECK(fixture.port.in_flight.empty() && fixture.sender.NextTick() == 1);
  fixture.counter->Tick();
  fixture.Advance();
  CHECK(fixture.port.in_flight.size() == 3 && fixture.sender.NextTick() == 2);
  fixture.counter->Tick();
  fixture.Advance();
  CHECK(fixture.port.in_flight.size() == 6 && fixture.sender.NextTick() == UINT64_MAX);
  fixture.CompleteAll();
  CHECK(fixture.OneEvent<PushEnded>().layers[1].computed_ns == fixture.counter->TickNs(2));
}

void CancelledPushEndsAfterItsLastCompletion() {
  Fixture fixture;
  fixture.Arm(1, 200);
  fixture.Advance();
  fixture.sender.Cancel(1);
  while (!fixture.port.in_flight.empty()) {
    CHECK(fixture.events.Drain().empty());
    fixture.CompleteOldest();
    fixture.Advance();
  }
  CHECK(fixture.OneEvent<PushEnded>().outcome == PushOutcome::kCancelled);
  CHECK(fixture.counters.num_writes_posted == kWindowWrites);
}

void FailedWriteFailsItsPeerAndNoOther() {
  Fixture fixture;
  fixture.Arm(1, 2);
  fixture.Arm(2, 2, 1, 1, 100);
  fixture.Advance();
  fixture.Flush(1);
  fixture.Arm(3, 1, 2);
  fixture.Advance();
  CHECK(fixture.port.in_flight.size() == 3);  // Two of push 1, one of push 3; the flush waits.
  fixture.CompleteOldest(ECONNRESET);
  std::vector<Event> events = fixture.events.Drain();
  CHECK(events.size() == 2);
  CHECK(!std::get<FlushEnded>(events[0]).delivered);
  CHECK(std::get<PushEnded>(events[1]).push_id == 2);
  fixture.CompleteOldest();
  const PushEnded failed = fixture.OneEvent<PushEnded>();
  CHECK(failed.push_id == 1 && failed.outcome == PushOutcome::kFailed && failed.error == ECONNRESET);
  fixture.CompleteOldest();
  CHECK(fixture.OneEvent<PushEnded>().outcome == PushOutcome::kDone);
  fixture.Arm(4, 1);
  CHECK(fixture.OneEvent<PushEnded>().outcome == PushOutcome::kFailed);
  fixture.Flush(2);
  CHECK(!fixture.OneEvent<FlushEnded>().delivered);
  CHECK(fixture.failed_peers == std::vector<uint32_t>{1});
  fixture.Advance();
  CHECK(fixture.port.in_flight.empty());
}

void RefusalsEndAtTheDeadline() {
  Fixture fixture;
  fixture.port.next_error = EAGAIN;
  fixture.Arm(1, 2);
  fixture.Advance(100);
  CHECK(fixture.sender.MustRetry());
  fixture.Advance(100 + kRefusalDeadlineNs - 1);
  CHECK(fixture.events.Drain().empty());
  fixture.Advance(100 + kRefusalDeadlineNs);
  const PushEnded ended = fixture.OneEvent<PushEnded>();
  CHECK(ended.outcome == PushOutcome::kFailed && ended.error == kPeerLostError);
  CHECK(!fixture.sender.MustRetry());
}

void RefusalThatEndsStartsTheDeadlineAnew() {
  Fixture fixture;
  fixture.port.next_error = EAGAIN;
  fixture.Arm(1, 2);
  fixture.Advance(100);
  fixture.port.next_error = 0;
  fixture.Advance(200);
  fixture.port.next_error = EAGAIN;
  fixture.Advance(100 + kRefusalDeadlineNs);
  CHECK(!fixture.sender.MustRetry());
  fixture.CompleteAll();
  CHECK(fixture.OneEvent<PushEnded>().outcome == PushOutcome::kDone);
}

void RefusedPushThatIsCancelledDoesNotFailItsPeerLater() {
  Fixture fixture;
  fixture.port.next_error = EAGAIN;
  fixture.Arm(1, 2);
  fixture.Advance(100);
  fixture.sender.Cancel(1);
  CHECK(fixture.OneEvent<PushEnded>().outcome == PushOutcome::kCancelled);
  fixture.Advance(200);
  CHECK(!fixture.sender.MustRetry());
  fixture.port.next_error = 0;
  fixture.Arm(2, 1);
  fixture.Advance(100 + kRefusalDeadlineNs);
  fixture.CompleteAll();
  CHECK(fixture.OneEvent<PushEnded>().outcome == PushOutcome::kDone);
}

void WritesGoOverThePairsInTurnInEveryLayer() {
  Fixture fixture(false, kRegionBytes, 2);
  fixture.Arm(1, 3, 1, 2, 0, {3, 1});
  fixture.counter->Tick();
  fixture.Advance();
  CHECK(fixture.port.num_open == 2);
  CHECK(fixture.port.in_flight.size() == 6);
  for (size_t i = 0; i < 6; ++i) {
    const WriteRequest& request = fixture.port.in_flight[i];
    const uint32_t pair = i % 3 % 2;
    CHECK(request.route.local_nic == pair && request.route.address == (pair == 0 ? 3u : 1u));
    CHECK(request.piece.target_key == (pair == 0 ? 13u : 11u));
  }
  CHECK(fixture.counters.bytes_posted_by_nic[0] == 4 * kPageBytes);
  CHECK(fixture.counters.bytes_posted_by_nic[1] == 2 * kPageBytes);
}

void OneNicWritesToAllOfThePeersInTurn() {
  Fixture fixture;
  fixture.Arm(1, 6, 1, 1, 0, {0, 2, 3});
  fixture.Advance();
  CHECK(fixture.port.num_open == 3);
  for (size_t i = 0; i < 6; ++i) {
    CHECK(fixture.port.in_flight[i].route.address == std::vector<uint32_t>({0, 2, 3})[i % 3]);
  }
}

void WindowIsOfEachRoute() {
  Fixture fixture(false, kRegionBytes, 2);
  fixture.Arm(1, 4 * kWindowWrites, 1, 1, 0, {0, 1});
  fixture.Advance();
  CHECK(fixture.port.in_flight.size() == 2 * kWindowWrites);
  const auto on_second = [](const WriteRequest& request) { return request.route.local_nic == 1; };
  for (size_t i = 0; i < fixture.port.in_flight.size();) {  // The second route drains, the first stands still.
    if (!on_second(fixture.port.in_flight[i])) {
      ++i;
      continue;
    }
    fixture.sender.WriteEnded(fixture.port.in_flight[i].context, 0, 2);
    fixture.port.in_flight.erase(fixture.port.in_flight.begin() + static_cast<ptrdiff_t>(i));
  }
  fixture.Advance();
  CHECK(fixture.port.in_flight.size() == kWindowWrites);
  while (!fixture.port.in_flight.empty()) {
    fixture.CompleteOldest();
    fixture.Advance();
  }
  CHECK(fixture.OneEvent<PushEnded>().outcome == PushOutcome::kDone);
}

void FailureOfOneRouteFailsThePeer() {
  Fixture fixture(false, kRegionBytes, 2);
  fixture.Arm(1, 4, 1, 1, 0, {0, 1});
  fixture.Arm(2, 1, 1, 1, 100, {0});
  fixture.Advance();
  fixture.CompleteOldest();
  fixture.CompleteOldest(ECONNRESET);
  CHECK(fixture.OneEvent<PushEnded>().push_id == 2);
  CHECK(fixture.failed_peers == std::vector<uint32_t>{1});
  fixture.CompleteAll();
  const PushEnded ended = fixture.OneEvent<PushEnded>();
  CHECK(ended.push_id == 1 && ended.outcome == PushOutcome::kFailed && ended.error == ECONNRESET);
}

void FailureFoundByAnotherGroupFailsThePeerAndIsNotToldAgain() {
  Fixture fixture;
  fixture.Arm(1, 1, 1, 1, 100);
  fixture.sender.PeerFailed(1, ECONNRESET);
  fixture.sender.PeerFailed(1, EIO);
  fixture.sender.PeerFailed(99, EIO);
  const PushEnded ended = fixture.OneEvent<PushEnded>();
  CHECK(ended.outcome == PushOutcome::kFailed && ended.error == ECONNRESET);
  CHECK(fixture.failed_peers.empty());
}

void RouteThatCanNotBeOpenedIsSaidAndTriedAgain() {
  Fixture fixture(false, kRegionBytes, 2);
  const auto target = fixture.TargetOf(1, {0, 1});
  fixture.port.open_error = EMFILE;
  CHECK(fixture.sender.OpenRoutes(1, *fixture.source, *target).error() == EMFILE);
  fixture.port.open_error = 0;
  CHECK(fixture.sender.OpenRoutes(1, *fixture.source, *target).ok());
  CHECK(fixture.sender.OpenRoutes(1, *fixture.source, *target).ok());
  CHECK(fixture.port.num_open == 2);
}

void FlushWritesOnceOnEachRouteThatLeadsToATarget() {
  Fixture fixture(false, kRegionBytes, 2);
  fixture.Arm(1, 2, 1, 1, 0, {0, 1});
  fixture.Arm(2, 2, 1, 1, 0, {2, 3});
  fixture.Advance();
  fixture.CompleteAll();
  CHECK(fixture.events.Drain().size() == 2);
  fixture.Flush(1, INT64_MAX, {{0, 1}, {0, 1}, {1, 0}});  // The routes to nic 2 and 3 lead to none of them.
  fixture.Advance();
  CHECK(fixture.port.in_flight.size() == 2);
  CHECK(fixture.port.in_flight[0].route.address == 0 && fixture.port.in_flight[0].piece.target_key == 10);
  CHECK(fixture.port.in_flight[1].route.address == 1 && fixture.port.in_flight[1].piece.target_key == 11);
  fixture.CompleteOldest();
  CHECK(fixture.events.Drain().empty());
  fixture.CompleteOldest();
  CHECK(fixture.OneEvent<FlushEnded>().delivered);
}

void FlushThatIsRefusedHalfWayGoesOnWithTheOtherRoute() {
  Fixture fixture(false, kRegionBytes, 2);
  fixture.Arm(1, 2, 1, 1, 0, {0, 1});
  fixture.Advance();
  fixture.CompleteAll();
  fixture.events.Drain();
  fixture.Flush(1, INT64_MAX, {{0, 1}});
  fixture.port.num_accepted_before_refusal = 1;
  fixture.Advance();
  CHECK(fixture.port.in_flight.size() == 1 && fixture.sender.MustRetry());
  fixture.port.num_accepted_before_refusal = SIZE_MAX;
  fixture.Advance();
  CHECK(fixture.port.in_flight.size() == 2 && fixture.port.in_flight[1].route.local_nic == 1);
  fixture.CompleteAll();
  CHECK(fixture.OneEvent<FlushEnded>().delivered);
}

void FlushWithoutRoutesIsDeliveredAtOnce() {
  Fixture fixture;
  fixture.Flush(1);
  CHECK(fixture.OneEvent<FlushEnded>().delivered);
}

void FlushFailsWhenOneOfItsRoutesDoes() {
  Fixture fixture(false, kRegionBytes, 2);
  fixture.Arm(1, 2, 1, 1, 0, {0, 1});
  fixture.Advance();
  fixture.CompleteAll();
  fixture.events.Drain();
  fixture.Flush(1, INT64_MAX, {{0, 1}});
  fixture.Advance();
  fixture.CompleteOldest();
  fixture.CompleteOldest(ENOTCONN);
  const FlushEnded ended = fixture.OneEvent<FlushEnded>();
  CHECK(!ended.delivered && ended.error == ENOTCONN);
}

void WriteOfAnExpiredFlushDoesNotCountForANewOneOfItsId() {
  Fixture fixture;
  fixture.Arm(1, 1);
  fixture.Advance();
  fixture.CompleteAll();
  fixture.events.Drain();
  fixture.Flush(1, 500);
  fixture.Advance(100);
  fixture.Advance(500);
  CHECK(!fixture.OneEvent<FlushEnded>().delivered);
  fixture.Flush(1);
  fixture.Advance(600);
  CHECK(fixture.port.in_flight.size() == 1);
  fixture.CompleteOldest();
  CHECK(fixture.events.Drain().empty());
  fixture.Advance(700);
  fixture.CompleteOldest();
  CHECK(fixture.OneEvent<FlushEnded>().delivered);
}

void FlushWaitsForWhatIsInFlightAndHasNoImmediate() {
  Fixture fixture;
  fixture.Arm(1, 3);
  fixture.Advance();
  fixture.Flush(1);
  fixture.Arm(2, 1);
  fixture.Advance();
  CHECK(fixture.port.in_flight.size() == 3);
  fixture.CompleteAll();
  fixture.events.Drain();
  fixture.Advance();
  CHECK(fixture.port.in_flight.size() == 2);
  CHECK(!fixture.port.in_flight[0].has_immediate && fixture.port.in_flight[0].delivery_complete);
  CHECK(fixture.port.in_flight[1].has_immediate && !fixture.port.in_flight[1].delivery_complete);
  fixture.CompleteOldest();
  CHECK(fixture.OneEvent<FlushEnded>().delivered);
}

void FlushExpiresOncePostedOrNot() {
  Fixture fixture;
  fixture.Arm(1, 1);
  fixture.Advance();
  fixture.Flush(1, 500);
  fixture.Advance(500);
  CHECK(fixture.OneEvent<FlushEnded>().error == ETIMEDOUT);
  fixture.CompleteAll();
  fixture.events.Drain();
  fixture.Flush(2, 900);
  fixture.Advance(600);
  CHECK(fixture.port.in_flight.size() == 1);
  fixture.Advance(900);
  CHECK(fixture.OneEvent<FlushEnded>().error == ETIMEDOUT);
  fixture.CompleteAll();
  CHECK(fixture.events.Drain().empty());
}

void ReorderingProviderGetsDeliveryCompleteWrites() {
  Fixture fixture(true);
  fixture.Arm(1, 2);
  fixture.Advance();
  CHECK(std::all_of(fixture.port.in_flight.begin(), fixture.port.in_flight.end(),
                    [](const WriteRequest& request) { return request.delivery_complete; }));
}

void WriteAcrossSlicesHasItsImmediateOnTheLastPiece() {
  Fixture fixture(false, 1536);  // Page 1 is [1024, 2048), so it crosses.
  fixture.Arm(1, 2);
  fixture.Advance();
  CHECK(fixture.port.in_flight.size() == 2);
  CHECK(fixture.port.in_flight[1].piece.num_bytes == 512 && !fixture.port.in_flight[1].has_immediate);
  CHECK(fixture.port.in_flight[1].delivery_complete);
  fixture.Advance();
  CHECK(fixture.port.in_flight.size() == 2);
  fixture.CompleteAll();
  fixture.Advance();
  CHECK(fixture.port.in_flight.size() == 1 && fixture.port.in_flight[0].has_immediate);
  fixture.CompleteAll();
  CHECK(fixture.OneEvent<PushEnded>().outcome == PushOutcome::kDone);
}

void RemovedPeerDrainsThenItsRoutesAreClosed() {
  Fixture fixture(false, kRegionBytes, 2);
  fixture.Arm(1, 2, 1, 1, 0, {0, 1});
  fixture.Arm(2, 2, 1, 1, 100);
  fixture.Advance();
  fixture.sender.RemovePeer(1, 10);
  CHECK(fixture.OneEvent<PushEnded>().push_id == 2);
  fixture.Advance(11);
  CHECK(fixture.port.num_open == 3);
  fixture.CompleteAll();
  CHECK(fixture.OneEvent<PushEnded>().outcome == PushOutcome::kCancelled);
  fixture.Advance(12);
  CHECK(fixture.port.num_open == 0 && fixture.failed_peers.empty());
}

void RemovedPeerThatDoesNotDrainOrphansItsWrites() {
  Fixture fixture(false, kRegionBytes, 2);
  fixture.Arm(1, 2, 1, 1, 0, {0, 1});
  fixture.Advance();
  fixture.CompleteOldest();
  fixture.sender.RemovePeer(1, 10);
  fixture.Advance(10 + kRemovalDrainNs);
  const PushEnded ended = fixture.OneEvent<PushEnded>();
  CHECK(ended.outcome == PushOutcome::kFailed && ended.error == kPeerLostError);
  CHECK(fixture.port.num_open == 0 && fixture.sender.num_in_flight() == 0);
  fixture.CompleteAll();  // They come late all the same.
  CHECK(fixture.events.Drain().empty() && fixture.sender.num_in_flight() == 0);
}

}  // namespace
}  // namespace pdserve::fabric

int main() {
  using namespace pdserve::fabric;
  RUN(WindowBoundsWritesInFlight);
  RUN(LayersArePostedAsTheCounterRises);
  RUN(CancelledPushEndsAfterItsLastCompletion);
  RUN(FailedWriteFailsItsPeerAndNoOther);
  RUN(RefusalsEndAtTheDeadline);
  RUN(RefusalThatEndsStartsTheDeadlineAnew);
  RUN(RefusedPushThatIsCancelledDoesNotFailItsPeerLater);
  RUN(WritesGoOverThePairsInTurnInEveryLayer);
  RUN(OneNicWritesToAllOfThePeersInTurn);
  RUN(WindowIsOfEachRoute);
  RUN(FailureOfOneRouteFailsThePeer);
  RUN(FailureFoundByAnotherGroupFailsThePeerAndIsNotToldAgain);
  RUN(RouteThatCanNotBeOpenedIsSaidAndTriedAgain);
  RUN(FlushWritesOnceOnEachRouteThatLeadsToATarget);
  RUN(FlushThatIsRefusedHalfWayGoesOnWithTheOtherRoute);
  RUN(FlushWithoutRoutesIsDeliveredAtOnce);
  RUN(FlushFailsWhenOneOfItsRoutesDoes);
  RUN(WriteOfAnExpiredFlushDoesNotCountForANewOneOfItsId);
  RUN(FlushWaitsForWhatIsInFlightAndHasNoImmediate);
  RUN(FlushExpiresOncePostedOrNot);
  RUN(ReorderingProviderGetsDeliveryCompleteWrites);
  RUN(WriteAcrossSlicesHasItsImmediateOnTheLastPiece);
  RUN(RemovedPeerDrainsThenItsRoutesAreClosed);
  RUN(RemovedPeerThatDoesNotDrainOrphansItsWrites);
}
