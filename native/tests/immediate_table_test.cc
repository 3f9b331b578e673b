#include "fabric/immediate_table.h"

#include <algorithm>
#include <atomic>
#include <thread>
#include <vector>

#include "tests/check.h"

namespace pdserve::fabric {
namespace {

constexpr int64_t kFarDeadlineNs = INT64_MAX;

uint32_t ImmediateOf(uint32_t slot, uint32_t generation) { return slot << kGenerationBits | generation; }

struct Fixture {
  EventQueue events;
  ImmediateTable table{&events};

  uint64_t Arrive(uint32_t immediate, int64_t now_ns = 1) { return table.Arrive({{immediate}}, now_ns); }
  bool Expect(uint32_t immediate, uint32_t num_writes, int64_t deadline_ns = kFarDeadlineNs, bool record = false) {
    return table.Expect({immediate, num_writes, deadline_ns, record}).ok();
  }
};

void ArrivalsBeforeExpectCount() {
  Fixture fixture;
  CHECK(fixture.Arrive(7, 100) == 0);
  CHECK(fixture.Arrive(7, 200) == 0);
  CHECK(fixture.events.Drain().empty());
  CHECK(fixture.Expect(7, 2));
  const std::vector<Event> events = fixture.events.Drain();
  CHECK(events.size() == 1);
  const Landed& landed = std::get<Landed>(events[0]);
  CHECK(landed.immediate == 7 && landed.num_writes == 2 && landed.first_ns == 100 && landed.last_ns == 200);
}

void LandedComesOnceAndAtTheCount() {
  Fixture fixture;
  CHECK(fixture.Expect(7, 2));
  fixture.Arrive(7);
  CHECK(fixture.events.Drain().empty());
  fixture.Arrive(7);
  CHECK(fixture.events.Drain().size() == 1);
  fixture.Arrive(7);
  CHECK(fixture.events.Drain().empty());
}

void RecordedArrivalsAreOneEach() {
  Fixture fixture;
  CHECK(fixture.Expect(7, 3, kFarDeadlineNs, true));
  for (const int64_t now_ns : {10, 20, 30}) fixture.Arrive(7, now_ns);
  const std::vector<Event> events = fixture.events.Drain();
  CHECK((std::get<Landed>(events.at(0)).arrivals_ns == std::vector<int64_t>{10, 20, 30}));
}

void ClosedAndEarlierGenerationsAreDropped() {
  Fixture fixture;
  fixture.table.Forget(ImmediateOf(3, 5));
  CHECK(fixture.Arrive(ImmediateOf(3, 5)) == 1);
  CHECK(fixture.Arrive(ImmediateOf(3, 4)) == 1);
  CHECK(fixture.Arrive(ImmediateOf(3, kNumGenerations - 1)) == 1);
  CHECK(fixture.Arrive(ImmediateOf(3, 6)) == 0);
  CHECK(fixture.Arrive(ImmediateOf(4, 5)) == 0);
  CHECK(!fixture.Expect(ImmediateOf(3, 5), 1));
}

void GenerationsWrapAround() {
  Fixture fixture;
  for (uint32_t use = 0; use < 3 * kNumGenerations; ++use) {
    const uint32_t immediate = ImmediateOf(1, use % kNumGenerations);
    CHECK(fixture.Arrive(immediate) == 0);
    CHECK(fixture.Expect(immediate, 1));
    CHECK(fixture.events.Drain().size() == 1);
    fixture.table.Forget(immediate);
    CHECK(fixture.Arrive(immediate) == 1);
  }
}

void ForgettingAnEarlierGenerationReopensNothing() {
  Fixture fixture;
  fixture.table.Forget(ImmediateOf(1, 9));
  fixture.table.Forget(ImmediateOf(1, 3));
  CHECK(fixture.Arrive(ImmediateOf(1, 9)) == 1);
}

void UnexpectedCountersAreBounded() {
  Fixture fixture;
  for (uint32_t slot = 0; slot < ImmediateTable::kMaxUnexpected; ++slot)
    CHECK(fixture.Arrive(ImmediateOf(slot, 0)) == 0);
  const uint32_t over = ImmediateOf(ImmediateTable::kMaxUnexpected, 0);
  CHECK(fixture.Arrive(over) == 1);
  CHECK(fixture.Expect(ImmediateOf(0, 0), 2));
  CHECK(fixture.Arrive(over) == 0);
  fixture.table.Forget(ImmediateOf(1, 0));
  CHECK(fixture.Arrive(ImmediateOf(ImmediateTable::kMaxUnexpected + 1, 0)) == 0);
}

void CountersAreBounded() {
  Fixture fixture;
  for (uint32_t slot = 0; slot < ImmediateTable::kMaxCounters; ++slot) CHECK(fixture.Expect(ImmediateOf(slot, 0), 1));
  const Status status = fixture.table.Expect({ImmediateOf(ImmediateTable::kMaxCounters, 0), 1, kFarDeadlineNs, false});
  CHECK(status.code() == Status::Code::kCapacity);
}

void ExpectationsExpireInOrderAndOnce() {
  Fixture fixture;
  CHECK(fixture.Expect(1, 2, 100));
  CHECK(fixture.Expect(2, 2, 50));
  fixture.Arrive(2);
  fixture.table.Expire(49);
  CHECK(fixture.events.Drain().empty());
  fixture.table.Expire(100);
  const std::vector<Event> events = fixture.events.Drain();
  CHECK(events.size() == 2);
  const auto& first = std::get<ExpectationExpired>(events[0]);
  CHECK(first.immediate == 2 && first.num_arrived == 1 && first.num_expected == 2);
  fixture.table.Expire(1000);
  CHECK(fixture.events.Drain().empty());
  CHECK(fixture.Expect(2, 2, 2000));
  fixture.Arrive(2);
  CHECK(fixture.events.Drain().size() == 1);
}

void InstantsOfThreadsThatReadTheClockInAnotherOrderNeverDecrease() {
  Fixture fixture;
  CHECK(fixture.Expect(7, 4, kFarDeadlineNs, true));
  for (const int64_t now_ns : {20, 10, 30, 25}) fixture.Arrive(7, now_ns);
  const std::vector<Event> events = fixture.events.Drain();
  const Landed& landed = std::get<Landed>(events.at(0));
  CHECK((landed.arrivals_ns == std::vector<int64_t>{20, 20, 30, 30}));
  CHECK(landed.first_ns == 20 && landed.last_ns == 30);
}

// As the worker threads of several domain groups use it: one count over all, one landing, and expiry in between.
void CountsOfSeveralThreadsAddUpToOneLanding() {
  Fixture fixture;
  constexpr uint32_t kNumThreads = 4;
  constexpr uint32_t kNumSlots = 100;
  constexpr uint32_t kNumWrites = 25;
  std::vector<std::thread> counting;
  for (uint32_t thread = 0; thread < kNumThreads; ++thread) {
    counting.emplace_back([&fixture] {
      for (uint32_t write = 0; write < kNumWrites; ++write) {
        for (uint32_t slot = 0; slot < kNumSlots; ++slot) CHECK(fixture.Arrive(ImmediateOf(slot, 0), write + 1) == 0);
        fixture.table.Expire(write);
      }
    });
  }
  for (uint32_t slot = 0; slot < kNumSlots; ++slot) {
    CHECK(fixture.Expect(ImmediateOf(slot, 0), kNumThreads * kNumWrites, 1'000'000, true));
  }
  std::vector<int> num_landed(kNumSlots);
  size_t num_events = 0;
  tests::WaitUntil([&] {
    for (const Event& event : fixture.events.Drain()) {
      const Landed& landed = std::get<Landed>(event);
      CHECK(landed.num_writes == kNumThreads * kNumWrites);
      CHECK(std::is_sorted(landed.arrivals_ns.begin(), landed.arrivals_ns.end()));
      CHECK(++num_landed.at(landed.immediate >> kGenerationBits) == 1);
      ++num_events;
    }
    return num_events == kNumSlots;
  });
  for (std::thread& thread : counting) thread.join();
  fixture.table.Expire(2'000'000);
  CHECK(fixture.events.Drain().empty());
}

void CountingAndExpectingAtTheSameTimeLosesNothing() {
  Fixture fixture;
  constexpr uint32_t kNumSlots = 200;
  constexpr uint32_t kNumWrites = 50;
  std::thread counting([&] {
    for (uint32_t write = 0; write < kNumWrites; ++write) {
      for (uint32_t slot = 0; slot < kNumSlots; ++slot) CHECK(fixture.Arrive(ImmediateOf(slot, 0)) == 0);
    }
  });
  for (uint32_t slot = 0; slot < kNumSlots; ++slot) CHECK(fixture.Expect(ImmediateOf(slot, 0), kNumWrites));
  size_t num_landed = 0;
  tests::WaitUntil([&] { return (num_landed += fixture.events.Drain().size()) == kNumSlots; });
  counting.join();
}

}  // namespace
}  // namespace pdserve::fabric

int main() {
  using namespace pdserve::fabric;
  RUN(ArrivalsBeforeExpectCount);
  RUN(LandedComesOnceAndAtTheCount);
  RUN(RecordedArrivalsAreOneEach);
  RUN(ClosedAndEarlierGenerationsAreDropped);
  RUN(GenerationsWrapAround);
  RUN(ForgettingAnEarlierGenerationReopensNothing);
  RUN(UnexpectedCountersAreBounded);
  RUN(CountersAreBounded);
  RUN(ExpectationsExpireInOrderAndOnce);
  RUN(InstantsOfThreadsThatReadTheClockInAnotherOrderNeverDecrease);
  RUN(CountsOfSeveralThreadsAddUpToOneLanding);
  RUN(CountingAndExpectingAtTheSameTimeLosesNothing);
}
