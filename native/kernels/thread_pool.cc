#include "kernels/thread_pool.h"

namespace pdserve {

ThreadPool::ThreadPool(size_t num_threads) {
  for (size_t thread = 1; thread < num_threads; ++thread) {
    workers_.emplace_back([this, thread] { Work(thread); });
  }
}

ThreadPool::~ThreadPool() {
  stops_ = true;
  round_.fetch_add(1, std::memory_order_release);
  round_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::Run(size_t num_tasks, const std::function<void(size_t, size_t)>& task) {
  if (workers_.empty() || num_tasks < 2) {
    for (size_t i = 0; i < num_tasks; ++i) task(i, 0);
    return;
  }
  task_ = &task;
  num_tasks_ = num_tasks;
  next_task_.store(0, std::memory_order_relaxed);
  num_busy_.store(static_cast<uint32_t>(workers_.size()), std::memory_order_relaxed);
  round_.fetch_add(1, std::memory_order_release);
  round_.notify_all();
  TakeTasks(0);
  for (uint32_t busy; (busy = num_busy_.load(std::memory_order_acquire)) != 0;) {
    num_busy_.wait(busy, std::memory_order_acquire);
  }
}

void ThreadPool::Work(size_t thread) {
  for (uint32_t seen = 0;;) {
    round_.wait(seen, std::memory_order_acquire);
    seen = round_.load(std::memory_order_acquire);
    if (stops_) return;
    TakeTasks(thread);
    if (num_busy_.fetch_sub(1, std::memory_order_acq_rel) == 1) num_busy_.notify_one();
  }
}

void ThreadPool::TakeTasks(size_t thread) {
  for (size_t i; (i = next_task_.fetch_add(1, std::memory_order_relaxed)) < num_tasks_;) (*task_)(i, thread);
}

}  // namespace pdserve
