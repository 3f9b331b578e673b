// The sender on one route: windows, ticks, cancels, refusals, failures.

#include <algorithm>
#include <vector>

#include "tests/check.h"
#include "tests/sender_fixture.h"

namespace pdserve::fabric {
namespace {

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
  RUN(ReorderingProviderGetsDeliveryCompleteWrites);
  RUN(WriteAcrossSlicesHasItsImmediateOnTheLastPiece);
}
