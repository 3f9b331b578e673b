// A thread that follows a layer counter and tells the worker thread when a tick that something waits for has come.
//
// Thread safety: SetWanted, ticks and counter from one thread, Stop from another.
// Lifetime: the counter may go away after Stop.
// Cost: the thread sleeps on a futex, on its own while nothing is wanted, else on the counter's.
//
// Invariants:
//   1. `wake` is called at least once after the counter has reached the wanted tick, unless the caller of SetWanted
//      read the counter after it and saw that itself.
//   2. While nothing is wanted, ticks do not wake the thread.

#ifndef PDSERVE_FABRIC_LAYER_WATCHER_H_
#define PDSERVE_FABRIC_LAYER_WATCHER_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <thread>

#include "layer_counter/layer_counter.h"

namespace pdserve::fabric {

class LayerWatcher {
 public:
  static constexpr uint64_t kNothing = UINT64_MAX;

  // `wake` is called on the watcher's thread and must not wait.
  LayerWatcher(LayerCounter* counter, std::function<void()> wake);
  ~LayerWatcher() { Stop(); }
  LayerWatcher(const LayerWatcher&) = delete;
  LayerWatcher& operator=(const LayerWatcher&) = delete;

  // Ends the thread. Calling it again changes nothing.
  void Stop();

  // The lowest tick that something waits for, or kNothing.
  void SetWanted(uint64_t tick);

  uint64_t ticks() const { return counter_->ticks.load(std::memory_order_seq_cst); }
  const LayerCounter* counter() const { return counter_; }

 private:
  void Run();

  LayerCounter* const counter_;
  const std::function<void()> wake_;
  std::atomic<uint64_t> wanted_{kNothing};
  std::atomic<uint32_t> revision_{0};  // The word the thread sleeps on while nothing is wanted.
  std::atomic<bool> stopping_{false};
  std::thread thread_;
};

}  // namespace pdserve::fabric

#endif  // PDSERVE_FABRIC_LAYER_WATCHER_H_
