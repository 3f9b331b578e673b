// What the worker thread is asked to do, in order.
//
// Thread safety: any thread puts, one thread takes.
// Bound: Put refuses beyond kMaxCommands, so that a worker thread that hangs in a provider is noticed, not hidden.

#ifndef PDSERVE_FABRIC_COMMAND_QUEUE_H_
#define PDSERVE_FABRIC_COMMAND_QUEUE_H_

#include <atomic>
#include <functional>
#include <mutex>
#include <utility>
#include <vector>

#include "fabric/wake_fd.h"

namespace pdserve::fabric {

class CommandQueue {
 public:
  using Command = std::function<void()>;

  // The worker thread takes all commands each turn (well under 1 ms): more than this many means that it stands still.
  static constexpr size_t kMaxCommands = 16384;

  // False when the queue is full; the command is not kept then.
  [[nodiscard]] bool Put(Command command) {
    {
      const std::lock_guard lock(mutex_);
      if (commands_.size() >= kMaxCommands) return false;
      commands_.push_back(std::move(command));
    }
    Wake();
    return true;
  }

  std::vector<Command> TakeAll() {
    if (!woken_.exchange(false)) return {};  // Saves two system calls in most turns.
    wake_.Clear();
    const std::lock_guard lock(mutex_);
    return std::exchange(commands_, {});
  }

  // Ends a wait for wake_fd() without a command.
  void Wake() {
    wake_.Set();
    woken_.store(true);  // After Set: whoever sees it may clear wake_ without losing this call.
  }
  int wake_fd() const { return wake_.fd(); }

 private:
  std::mutex mutex_;
  std::vector<Command> commands_;  // GUARDED_BY(mutex_)
  WakeFd wake_;
  std::atomic<bool> woken_{false};
};

}  // namespace pdserve::fabric

#endif  // PDSERVE_FABRIC_COMMAND_QUEUE_H_
