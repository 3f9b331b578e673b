// The thread that owns the libfabric objects of one domain group, and everything that moves data over its NICs.
//
// Thread safety: Start, BeginStop and Stop from one thread; Call, Put and Wake from any; the rest from commands alone.
// Lifetime: `events`, `counters` and `immediates` outlive the worker, and so does the memory that was registered. A
//     worker whose Stop returned false must never be destroyed: its thread is still inside the provider.
//
// Invariants:
//   1. The thread never waits longer than kMaxWaitMs, so deadlines are kept to that.
//   2. The thread never holds, and never waits for, Python's interpreter lock.

#ifndef PDSERVE_FABRIC_WORKER_H_
#define PDSERVE_FABRIC_WORKER_H_

#include <array>
#include <atomic>
#include <chrono>
#include <functional>
#include <future>
#include <memory>
#include <thread>
#include <vector>

#include "fabric/command_queue.h"
#include "fabric/domain_group.h"
#include "fabric/event_queue.h"
#include "fabric/fabric_counters.h"
#include "fabric/immediate_table.h"
#include "fabric/layer_watcher.h"
#include "fabric/sender.h"

namespace pdserve::fabric {

// How long a fence keeps making progress after its registration was closed, before it says that nothing is in flight.
// The key is checked when a write's header arrives; after that its payload lands even though the region is closed (tcp
// 1.17). What is under way is then in socket buffers (at most 6 MiB each side by default) or the rest of one window:
// 64 MiB take 0.6 s at 1 Gbit/s. A sender that was stopped in the middle of a write can be later than any such time, so
// the messenger fences only peers that are known dead, unreachable by their lease, or restarted.
inline constexpr int64_t kFenceSettleNs = 1'000'000'000;

class Worker {
 public:
  static constexpr int kMaxWaitMs = 50;
  // Draining has a second; closing takes milliseconds.
  static constexpr std::chrono::milliseconds kStopDeadline{5000};

  struct Options {
    const Provider* provider;  // Static.
    DomainGroup::Options group;
    std::vector<uint32_t> cpus;  // The thread, and those it starts, run on these alone; empty: on any.
  };

  // `peer_failed` is called on the worker thread, as Sender says.
  Worker(EventQueue* events, FabricCounters* counters, ImmediateTable* immediates,
         std::function<void(uint32_t, int)> peer_failed)
      : events_(events), counters_(counters), immediates_(immediates), peer_failed_(std::move(peer_failed)) {}
  ~Worker() { (void)Stop(); }
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  // Opens the domains on the new thread; returns when that is done.
  Status Start(Options options);
  // Has the thread cancel and drain, so that several workers do it at the same time.
  void BeginStop();
  // Cancels, drains with a deadline, closes. No event is queued after it. False when the thread did not come back: the
  // provider hangs (shm 1.17 waits for ever for a lock that a killed peer held). Calling it again changes nothing.
  [[nodiscard]] bool Stop(std::chrono::milliseconds deadline = kStopDeadline);

  // Ends a wait of the worker thread.
  void Wake() { commands_.Wake(); }
  // Runs `command` on the worker thread soon. Capacity when too many are queued.
  Status Put(CommandQueue::Command command);
  // Runs `command` on the worker thread and returns what it returned; it owns what it captures, for it may run after a
  // timeout.
  Status Call(std::function<Status()> command);

  // --- on the worker thread
  DomainGroup& group() { return *group_; }
  Sender& sender() { return *sender_; }
  // Ends in Fenced. REQUIRES: `exposure` came from the group's Expose and was not fenced.
  void Fence(RegionDescriptor exposure);
  // Follows `counter`, on a thread with the worker thread's cores, which the caller stops before `counter` goes away.
  std::shared_ptr<LayerWatcher> Watch(LayerCounter* counter);

 private:
  struct SettlingFence {
    int64_t settled_ns;
    RegionDescriptor exposure;
  };

  void Run(const Options& options, std::promise<Status> opened);
  Status Open(const Options& options);
  void Turn();
  size_t ReadCompletions();
  void EmitSettledFences(int64_t now_ns);
  // Returns when there may be something to do. `active`: this turn did something.
  void Wait(bool active);
  void WaitOnDescriptors(const std::vector<int>& fds);
  void SleepInSteps();
  void DrainAndClose();

  EventQueue* const events_;
  FabricCounters* const counters_;
  ImmediateTable* const immediates_;
  CommandQueue commands_;
  const std::function<void(uint32_t, int)> peer_failed_;
  std::atomic<bool> stopping_{false};

  // The worker thread's own, in the order in which destruction is safe in reverse.
  alignas(kFlushWordBytes) std::array<char, kFlushWordBytes> zero_word_bytes_{};
  std::unique_ptr<DomainGroup> group_;
  std::vector<SettlingFence> settling_;
  std::shared_ptr<const LocalRegion> zero_word_;
  std::unique_ptr<Sender> sender_;
  std::shared_ptr<LayerWatcher> watcher_;
  int64_t active_ns_ = 0;  // The last turn that did something.
  int64_t sleep_ns_ = 0;   // The next sleep where there is no descriptor to wait on.

  std::thread thread_;
  std::promise<void> thread_ended_;
  bool is_abandoned_ = false;  // The thread did not come back.
};

}  // namespace pdserve::fabric

#endif  // PDSERVE_FABRIC_WORKER_H_
