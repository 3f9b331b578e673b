#include "fabric/worker.h"

#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <sys/prctl.h>

#include <algorithm>
#include <chrono>
#include <string>
#include <utility>

#include "fabric/shm_files.h"

namespace pdserve::fabric {
namespace {

// Pinning a KV region on a NIC takes 0.1 s per GiB; a call that is not back by now never will be.
constexpr std::chrono::seconds kCallDeadline{120};

constexpr int64_t kCloseDrainNs = 1'000'000'000;

// While a peer refuses writes (a connection is opening), it is asked again this often.
constexpr int kRetryWaitMs = 1;

// After something happened more usually follows within the time of a few 64 KiB writes: worth a look before a system
// call. Beside a forward pass it costs 3 ms a pass of 30 layers. 100 us instead of 20 us gained about a tenth at 16 KiB
// on tcp (bench-transfer, 2026-11-29, 2-core Xeon VM).
constexpr int64_t kSpinNs = 100'000;

// Sleeps where nothing can be waited on double from the cost of a sleep up to what an idle receiver may add to a TTFT
// of a hundred milliseconds without anyone noticing. 1,000 wake-ups a second cost about 1% of a core.
constexpr int64_t kMinSleepNs = 20'000;
constexpr int64_t kMaxSleepNs = 1'000'000;

// With writes in flight the sleep stays well under the time of a window of 16 KiB pages (0.4 ms), or it would run dry.
constexpr int64_t kMaxSleepInFlightNs = 50'000;

constexpr size_t kBatchesPerTurn = 4;

Status PinThisThread(const std::vector<uint32_t>& cpus) {
  if (cpus.empty()) return Status::Ok();
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  for (const uint32_t cpu : cpus) {
    if (cpu >= CPU_SETSIZE) return Status::Invalid("open", "there is no core " + std::to_string(cpu));
    CPU_SET(cpu, &allowed);
  }
  const int error = pthread_setaffinity_np(pthread_self(), sizeof(allowed), &allowed);
  if (error == 0) return Status::Ok();
  return Status::Failed("pthread_setaffinity_np", error,
                        "name cores that this process may use (taskset -p shows them)");
}

}  // namespace

Status Worker::Start(Options options) {
  std::promise<Status> opened;
  std::future<Status> result = opened.get_future();
  thread_ = std::thread(&Worker::Run, this, std::move(options), std::move(opened));
  pthread_setname_np(thread_.native_handle(), "fabric-worker");
  return result.get();
}

void Worker::BeginStop() {
  stopping_.store(true);
  commands_.Wake();
}

bool Worker::Stop(std::chrono::milliseconds deadline) {
  BeginStop();
  if (!thread_.joinable()) return !is_abandoned_;
  if (thread_ended_.get_future().wait_for(deadline) == std::future_status::ready) {
    thread_.join();
    return true;
  }
  is_abandoned_ = true;
  thread_.detach();
  return false;
}

Status Worker::Put(CommandQueue::Command command) {
  if (stopping_.load()) return Status::Failed("fabric", ESHUTDOWN, "it was closed");
  if (commands_.Put(std::move(command))) return Status::Ok();
  return Status::Capacity("fabric", "the worker thread is behind with its commands");
}

Status Worker::Call(std::function<Status()> command) {
  auto done = std::make_shared<std::promise<Status>>();
  std::future<Status> result = done->get_future();
  if (Status status = Put([done, command = std::move(command)] { done->set_value(command()); }); !status.ok()) {
    return status;
  }
  if (result.wait_for(kCallDeadline) == std::future_status::ready) return result.get();
  return Status::Failed("fabric", ETIMEDOUT, "the worker thread hangs in the provider");
}

void Worker::Run(const Options& options, std::promise<Status> opened) {
  prctl(PR_SET_TIMERSLACK, 1'000);  // The default of 50 us would more than double the shortest sleeps.
  const Status status = Open(options);
  const bool is_open = status.ok();
  opened.set_value(status);
  if (is_open) {
    while (!stopping_.load(std::memory_order_relaxed)) Turn();
  }
  DrainAndClose();
  thread_ended_.set_value();
}

Status Worker::Open(const Options& options) {
  // Before anything is allocated, so that it lies near these cores.
  if (Status status = PinThisThread(options.cpus); !status.ok()) return status;
  if (options.provider->name == "shm") RemoveShmFilesOfDeadProcesses();
  if (Status status = DomainGroup::Open(*options.provider, options.group, &group_); !status.ok()) return status;
  Status status = group_->RegisterSource({zero_word_bytes_.data(), zero_word_bytes_.size()}, &zero_word_);
  if (!status.ok()) return status;
  sender_ = std::make_unique<Sender>(group_.get(), events_, counters_, zero_word_.get(), group_->reorders_writes(),
                                     peer_failed_);
  return Status::Ok();
}

void Worker::DrainAndClose() {
  if (sender_) {
    sender_->CancelAll();
    const int64_t deadline_ns = MonotonicNs() + kCloseDrainNs;
    while (sender_->num_in_flight() > 0 && MonotonicNs() < deadline_ns) ReadCompletions();
  }
  for (CommandQueue::Command& command : commands_.TakeAll()) {
    if (sender_) command();  // Somebody may wait for its result.
  }
  sender_.reset();
  group_.reset();
}

void Worker::Fence(RegionDescriptor exposure) {
  group_->CloseExposure(exposure);
  settling_.push_back({MonotonicNs() + kFenceSettleNs, std::move(exposure)});
}

std::shared_ptr<LayerWatcher> Worker::Watch(LayerCounter* counter) {
  watcher_ = std::make_shared<LayerWatcher>(counter, [this] { Wake(); });
  return watcher_;
}

void Worker::Turn() {
  const std::vector<CommandQueue::Command> commands = commands_.TakeAll();
  for (const CommandQueue::Command& command : commands) command();
  const size_t num_completions = ReadCompletions();
  const int64_t now_ns = MonotonicNs();
  sender_->Advance(watcher_ ? watcher_->counter() : nullptr, now_ns);
  immediates_->Expire(now_ns);
  EmitSettledFences(now_ns);
  if (num_completions > 0 || !commands.empty()) {
    active_ns_ = now_ns;
    sleep_ns_ = kMinSleepNs;
  }
  Wait(now_ns - active_ns_ < kSpinNs);
}

size_t Worker::ReadCompletions() {
  std::array<Completion, 64> completions;
  std::array<uint32_t, 64> immediates;
  size_t num_total = 0;
  for (size_t batch = 0; batch < kBatchesPerTurn; ++batch) {
    const size_t num_read = group_->ReadCompletions(completions);
    if (num_read == 0) break;
    num_total += num_read;
    const int64_t now_ns = MonotonicNs();
    size_t num_immediates = 0;
    for (const Completion& completion : std::span(completions).first(num_read)) {
      switch (completion.kind) {
        case Completion::Kind::kImmediate:
          immediates[num_immediates++] = completion.immediate;
          break;
        case Completion::Kind::kWriteEnded:
          sender_->WriteEnded(completion.context, completion.error, now_ns);
          break;
        case Completion::Kind::kUnattributed:
          break;  // A write of ours that ends so is found by its push's owner, who keeps a deadline.
      }
    }
    if (num_immediates > 0) {
      // Counted first: whoever sees a landing sees its writes in the totals.
      counters_->num_immediates_received.fetch_add(num_immediates, std::memory_order_relaxed);
      const uint64_t num_stale = immediates_->Arrive(std::span(immediates).first(num_immediates), now_ns);
      counters_->num_stale_immediates.fetch_add(num_stale, std::memory_order_relaxed);
    }
  }
  return num_total;
}

void Worker::EmitSettledFences(int64_t now_ns) {
  std::erase_if(settling_, [&](SettlingFence& fence) {
    if (fence.settled_ns > now_ns) return false;
    events_->Push(Fenced{std::move(fence.exposure)});
    return true;
  });
}

void Worker::Wait(bool active) {
  if (watcher_) {
    const uint64_t next_tick = sender_->NextTick();
    watcher_->SetWanted(next_tick);
    if (watcher_->ticks() >= next_tick) return;
  }
  if (active || stopping_.load(std::memory_order_relaxed)) return;
  const std::vector<int> fds = group_->wait_fds();
  if (fds.empty()) {
    SleepInSteps();
  } else {
    WaitOnDescriptors(fds);
  }
}

void Worker::WaitOnDescriptors(const std::vector<int>& fds) {
  if (!group_->PrepareToWait()) return;
  std::vector<pollfd> waited = {{commands_.wake_fd(), POLLIN, 0}};
  for (const int fd : fds) waited.push_back({fd, POLLIN, 0});
  poll(waited.data(), waited.size(), sender_->MustRetry() ? kRetryWaitMs : kMaxWaitMs);
}

void Worker::SleepInSteps() {
  pollfd waited = {commands_.wake_fd(), POLLIN, 0};
  const timespec timeout = {0, sleep_ns_};
  ppoll(&waited, 1, &timeout, nullptr);
  sleep_ns_ = std::min(2 * sleep_ns_, sender_->num_in_flight() > 0 ? kMaxSleepInFlightNs : kMaxSleepNs);
}

}  // namespace pdserve::fabric
