// The event queue, the command queue, the parts of a flush and the layer watcher: what passes between threads.

#include <poll.h>

#include <atomic>
#include <cerrno>
#include <memory>
#include <thread>
#include <vector>

#include "fabric/command_queue.h"
#include "fabric/event_queue.h"
#include "fabric/flush_parts.h"
#include "fabric/layer_watcher.h"
#include "tests/check.h"

namespace pdserve::fabric {
namespace {

bool IsReadable(int fd) {
  pollfd polled = {fd, POLLIN, 0};
  return poll(&polled, 1, 0) == 1;
}

void EventFdIsReadableExactlyWhileEventsWait() {
  EventQueue events;
  CHECK(!IsReadable(events.fd()));
  events.Push(FlushEnded{1, true, 0});
  events.Push(FlushEnded{2, true, 0});
  CHECK(IsReadable(events.fd()));
  CHECK(events.Drain().size() == 2);
  CHECK(!IsReadable(events.fd()));
}

void EventsKeepTheirOrderAcrossThreads() {
  EventQueue events;
  constexpr uint64_t kNumEvents = 20'000;
  std::thread pushing([&] {
    for (uint64_t i = 0; i < kNumEvents; ++i) events.Push(FlushEnded{i, true, 0});
  });
  uint64_t next = 0;
  tests::WaitUntil([&] {
    for (const Event& event : events.Drain()) CHECK(std::get<FlushEnded>(event).flush_id == next++);
    return next == kNumEvents;
  });
  pushing.join();
  CHECK(!IsReadable(events.fd()));
}

void EventsOfSeveralThreadsAreAllThereAndEachThreadsInOrder() {
  EventQueue events;
  constexpr uint64_t kNumThreads = 4;
  constexpr uint64_t kNumEvents = 5'000;
  std::vector<std::thread> pushing;
  for (uint64_t thread = 0; thread < kNumThreads; ++thread) {
    pushing.emplace_back([&events, thread] {
      for (uint64_t i = 0; i < kNumEvents; ++i) events.Push(FlushEnded{thread * kNumEvents + i, true, 0});
    });
  }
  std::vector<uint64_t> next(kNumThreads);
  uint64_t num_drained = 0;
  tests::WaitUntil([&] {
    for (const Event& event : events.Drain()) {
      const uint64_t flush_id = std::get<FlushEnded>(event).flush_id;
      CHECK(flush_id % kNumEvents == next[flush_id / kNumEvents]++);
      ++num_drained;
    }
    return num_drained == kNumThreads * kNumEvents;
  });
  for (std::thread& thread : pushing) thread.join();
  CHECK(!IsReadable(events.fd()));
}

void FlushEndsWithItsLastPartAndIsDeliveredOnlyIfAllAre() {
  EventQueue events;
  FlushParts delivered(7, 3, &events);
  delivered.PartEnded(0);
  delivered.PartEnded(0);
  CHECK(events.Drain().empty());
  delivered.PartEnded(0);
  const FlushEnded ended = std::get<FlushEnded>(events.Drain().at(0));
  CHECK(ended.flush_id == 7 && ended.delivered && ended.error == 0);
  FlushParts failed(8, 3, &events);
  failed.PartEnded(ETIMEDOUT);
  failed.PartEnded(ECONNRESET);
  failed.PartEnded(0);
  const FlushEnded not_delivered = std::get<FlushEnded>(events.Drain().at(0));
  CHECK(!not_delivered.delivered && not_delivered.error == ETIMEDOUT);
}

void FlushPartsEndedByRacingThreadsEndTheFlushOnce() {
  EventQueue events;
  for (int round = 0; round < 200; ++round) {
    FlushParts parts(1, 3, &events);
    std::vector<std::thread> ending;
    for (const int error : {0, ECONNRESET, 0}) ending.emplace_back([&parts, error] { parts.PartEnded(error); });
    for (std::thread& thread : ending) thread.join();
    const std::vector<Event> drained = events.Drain();
    CHECK(drained.size() == 1 && std::get<FlushEnded>(drained[0]).error == ECONNRESET);
  }
}

void CommandsAreTakenOnceAndInOrder() {
  CommandQueue commands;
  constexpr int kNumCommands = 10'000;
  std::vector<int> ran;
  std::thread putting([&] {
    for (int i = 0; i < kNumCommands; ++i) CHECK(commands.Put([&ran, i] { ran.push_back(i); }));
  });
  while (ran.size() < kNumCommands) {
    pollfd polled = {commands.wake_fd(), POLLIN, 0};
    CHECK(poll(&polled, 1, 10'000) == 1);  // A lost wake-up would end here.
    for (const CommandQueue::Command& command : commands.TakeAll()) command();
  }
  putting.join();
  for (int i = 0; i < kNumCommands; ++i) CHECK(ran[i] == i);
}

void CommandsBeyondTheBoundAreRefused() {
  CommandQueue commands;
  for (size_t i = 0; i < CommandQueue::kMaxCommands; ++i) CHECK(commands.Put([] {}));
  CHECK(!commands.Put([] {}));
  CHECK(commands.TakeAll().size() == CommandQueue::kMaxCommands);
  CHECK(commands.Put([] {}));
}

void WatcherWakesForTheWantedTickAndNotBefore() {
  auto counter = std::make_unique<LayerCounter>();
  std::atomic<int> num_wakes{0};
  LayerWatcher watcher(counter.get(), [&] { ++num_wakes; });
  counter->Tick();
  watcher.SetWanted(3);
  counter->Tick();
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  CHECK(num_wakes == 0);
  counter->Tick();
  tests::WaitUntil([&] { return num_wakes == 1; });
  CHECK(watcher.ticks() == 3);
}

// As the worker thread uses it: whatever the interleaving, each tick is seen without anyone polling for it.
void WatcherLosesNoTickInARace() {
  auto counter = std::make_unique<LayerCounter>();
  CommandQueue commands;
  LayerWatcher watcher(counter.get(), [&] { commands.Wake(); });
  constexpr uint64_t kNumTicks = 5'000;
  std::atomic<uint64_t> seen{0};
  std::thread ticking([&] {
    for (uint64_t tick = 1; tick <= kNumTicks; ++tick) {
      counter->Tick();
      if (tick % 16 == 0) tests::WaitUntil([&] { return seen.load() >= tick; });
    }
  });
  while (seen < kNumTicks) {
    commands.TakeAll();
    const uint64_t next = seen + 1;
    watcher.SetWanted(next);
    if (watcher.ticks() < next) {
      pollfd polled = {commands.wake_fd(), POLLIN, 0};
      CHECK(poll(&polled, 1, 10'000) == 1);
    }
    seen = watcher.ticks();
  }
  ticking.join();
}

void WatcherStopsWhileItWaitsForATick() {
  auto counter = std::make_unique<LayerCounter>();
  LayerWatcher watcher(counter.get(), [] {});
  watcher.SetWanted(1);
}

}  // namespace
}  // namespace pdserve::fabric

int main() {
  using namespace pdserve::fabric;
  RUN(EventFdIsReadableExactlyWhileEventsWait);
  RUN(EventsKeepTheirOrderAcrossThreads);
  RUN(EventsOfSeveralThreadsAreAllThereAndEachThreadsInOrder);
  RUN(FlushEndsWithItsLastPartAndIsDeliveredOnlyIfAllAre);
  RUN(FlushPartsEndedByRacingThreadsEndTheFlushOnce);
  RUN(CommandsAreTakenOnceAndInOrder);
  RUN(CommandsBeyondTheBoundAreRefused);
  RUN(WatcherWakesForTheWantedTickAndNotBefore);
  RUN(WatcherLosesNoTickInARace);
  RUN(WatcherStopsWhileItWaitsForATick);
}
