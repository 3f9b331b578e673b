// The sender on several routes: striping, flushes over all of them, and peers that fail or are removed.

#include <vector>

#include "tests/check.h"
#include "tests/sender_fixture.h"

namespace pdserve::fabric {
namespace {

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
  RUN(RemovedPeerDrainsThenItsRoutesAreClosed);
  RUN(RemovedPeerThatDoesNotDrainOrphansItsWrites);
}
