#include "fabric/layer_watcher.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <utility>

namespace pdserve::fabric {
namespace {

// Only how long a stop can take when it just missed the sleeping thread; no wake-up is ever lost to it.
constexpr int64_t kMaxSleepNs = 200'000'000;

void SleepWhile(std::atomic<uint32_t>* word, uint32_t value) {
  const timespec timeout = {0, kMaxSleepNs};
  syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, &timeout, nullptr, 0);
}

void WakeSleeper(std::atomic<uint32_t>* word, int operation) {
  syscall(SYS_futex, word, operation, INT32_MAX, nullptr, nullptr, 0);
}

}  // namespace

LayerWatcher::LayerWatcher(LayerCounter* counter, std::function<void()> wake)
    : counter_(counter), wake_(std::move(wake)), thread_([this] { Run(); }) {
  pthread_setname_np(thread_.native_handle(), "fabric-watcher");
}

void LayerWatcher::Stop() {
  if (!thread_.joinable()) return;
  stopping_.store(true);
  revision_.fetch_add(1);
  WakeSleeper(&revision_, FUTEX_WAKE_PRIVATE);
  WakeSleeper(&counter_->futex, FUTEX_WAKE);
  thread_.join();
}

void LayerWatcher::SetWanted(uint64_t tick) {
  const uint64_t before = wanted_.exchange(tick);
  // A thread that sleeps on the counter compares again at the next tick; one that sleeps for want of work must be told.
  if (before == kNothing && tick != kNothing) {
    revision_.fetch_add(1);
    WakeSleeper(&revision_, FUTEX_WAKE_PRIVATE);
  }
}

void LayerWatcher::Run() {
  while (!stopping_.load()) {
    const uint32_t revision = revision_.load();
    const uint64_t seen = ticks();
    const uint64_t wanted = wanted_.load();
    if (wanted == kNothing) {
      SleepWhile(&revision_, revision);
    } else if (seen < wanted) {
      counter_->Wait(seen, kMaxSleepNs);
    } else {
      // The worker thread sets what it wants next after it has looked at the counter; this tick is told once.
      uint64_t told = wanted;
      wanted_.compare_exchange_strong(told, kNothing);
      wake_();
    }
  }
}

}  // namespace pdserve::fabric
