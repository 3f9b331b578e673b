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
  int Write(const WriteRequest& request) override {
    if (next_error != 0) return next_error;
    in_flight.push_back(request);
    return 0;
  }

  int next_error = 0;
  std::deque<WriteRequest> in_flight;
};

struct Fixture {
  explicit Fixture(bool reorders_writes = false, uint64_t slice_bytes = kRegionBytes)
      : source(RegionOf(slice_bytes)),
        sender(&port, &events, &counters, source.get(), reorders_writes, [this](auto&) { ++num_forgotten; }) {
    sender.AddPeer(1, {});
    sender.AddPeer(2, {});
  }

  std::shared_ptr<const LocalRegion> RegionOf(uint64_t slice_bytes) {
    std::vector<LocalRegion::Slice> slices;
    for (const SliceRange& range : CutIntoSlices(kRegionBytes, slice_bytes)) slices.push_back({range, nullptr});
    return std::make_shared<const LocalRegion>(memory.data(), kRegionBytes, slices);
  }

  void Arm(uint64_t push_id, uint32_t num_pages, uint32_t peer_id = 1, uint32_t num_layers = 1, uint64_t due_tick = 0) {
    std::vector<uint32_t> pages(num_pages);
    for (uint32_t page = 0; page < num_pages; ++page) pages[page] = page;
    RegionDescriptor descriptor{.num_bytes = kRegionBytes, .slices = {{0, kRegionBytes, 0, 9}}};
    sender.Arm({.push_id = push_id,
                .peer_id = peer_id,
                .immediate = 5,
                .source = source,
                .target = std::make_shared<const RemoteRegion>(peer_id, descriptor),
                .source_pages = {pages, 0, kPageBytes, kPageBytes},
                .target_pages = {pages, 0, kPageBytes, kPageBytes},
                .num_layers = num_layers,
                .run_bytes = kPageBytes,
                .first_due_tick = due_tick});
  }

  void Flush(uint64_t flush_id, int64_t deadline_ns = INT64_MAX) {
    RegionDescriptor descriptor{.num_bytes = kRegionBytes, .slices = {{0, kRegionBytes, 0, 9}}};
    sender.Flush({flush_id, 1, std::make_shared<const RemoteRegion>(1, descriptor), deadline_ns});
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
  std::shared_ptr<const LocalRegion> source;
  ScriptedPort port;
  EventQueue events;
  FabricCounters counters;
  int num_forgotten = 0;
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

void RemovedPeerDrainsThenIsForgotten() {
  Fixture fixture;
  fixture.Arm(1, 2);
  fixture.Arm(2, 2, 1, 1, 100);
  fixture.Advance();
  fixture.sender.RemovePeer(1, 10);
  CHECK(fixture.OneEvent<PushEnded>().push_id == 2);
  fixture.Advance(11);
  CHECK(fixture.num_forgotten == 0);
  fixture.CompleteAll();
  CHECK(fixture.OneEvent<PushEnded>().outcome == PushOutcome::kCancelled);
  fixture.Advance(12);
  CHECK(fixture.num_forgotten == 1);
}

void RemovedPeerThatDoesNotDrainOrphansItsWrites() {
  Fixture fixture;
  fixture.Arm(1, 2);
  fixture.Advance();
  fixture.sender.RemovePeer(1, 10);
  fixture.Advance(10 + kRemovalDrainNs);
  const PushEnded ended = fixture.OneEvent<PushEnded>();
  CHECK(ended.outcome == PushOutcome::kFailed && ended.error == kPeerLostError);
  CHECK(fixture.num_forgotten == 1 && fixture.sender.num_in_flight() == 0);
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
  RUN(FlushWaitsForWhatIsInFlightAndHasNoImmediate);
  RUN(FlushExpiresOncePostedOrNot);
  RUN(ReorderingProviderGetsDeliveryCompleteWrites);
  RUN(WriteAcrossSlicesHasItsImmediateOnTheLastPiece);
  RUN(RemovedPeerDrainsThenIsForgotten);
  RUN(RemovedPeerThatDoesNotDrainOrphansItsWrites);
}
