// Threads that share the tasks of one kernel call.

#ifndef PDSERVE_KERNELS_THREAD_POOL_H_
#define PDSERVE_KERNELS_THREAD_POOL_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

namespace pdserve {

// Thread safety: Run belongs to one thread, the one that made the pool.
// Lifetime: the destructor joins the workers.
class ThreadPool {
 public:
  // The caller is one of the `num_threads`.
  explicit ThreadPool(size_t num_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  size_t num_threads() const { return workers_.size() + 1; }

  // Calls task(i, thread) for every i in [0, num_tasks), thread in [0, num_threads), and returns when all are done.
  void Run(size_t num_tasks, const std::function<void(size_t task, size_t thread)>& task);

 private:
  void Work(size_t thread);
  void TakeTasks(size_t thread);

  std::vector<std::thread> workers_;
  const std::function<void(size_t, size_t)>* task_ = nullptr;
  size_t num_tasks_ = 0;
  std::atomic<size_t> next_task_ = 0;
  std::atomic<uint32_t> round_ = 0;  // counts calls of Run; workers sleep on it
  std::atomic<uint32_t> num_busy_ = 0;
  bool stops_ = false;  // written before the last round
};

}  // namespace pdserve

#endif  // PDSERVE_KERNELS_THREAD_POOL_H_
