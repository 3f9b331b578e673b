// The kernels of the best instruction set of this machine, run on a pool of threads.

#ifndef PDSERVE_KERNELS_CPU_KERNELS_H_
#define PDSERVE_KERNELS_CPU_KERNELS_H_

#include <cstddef>
#include <string>
#include <vector>

#include "kernels/kernel_table.h"
#include "kernels/packed_matrix.h"
#include "kernels/pass_plan.h"
#include "kernels/thread_pool.h"

namespace pdserve {

// Thread safety: one thread at a time.
// Requires of every call: extents that match, which the caller (bindings.cc) has checked.
class CpuKernels {
 public:
  // An empty `instruction_set` takes the best. Throws std::invalid_argument for one that this machine lacks.
  CpuKernels(size_t num_threads, const std::string& instruction_set);

  // The names that the constructor takes here, best first.
  static std::vector<std::string> InstructionSets();

  const char* instruction_set() const { return table_.name; }

  void Linear(const float* x, size_t rows, const PackedMatrix& weight, float* out, bool adds);
  void RmsNorm(const RmsNormArgs& args, size_t rows);
  void Append(const AppendArgs& args, const PassPlan& plan);
  void Attend(const AttendArgs& args, const PassPlan& plan);

 private:
  // Splits [0, count) into ranges of at least `grain`, a few for each thread.
  template <typename Range>
  void Split(size_t count, size_t grain, const Range& range);

  const KernelTable& table_;
  ThreadPool pool_;
  std::vector<std::vector<float>> scratch_;  // of each thread, for Attend
};

}  // namespace pdserve

#endif  // PDSERVE_KERNELS_CPU_KERNELS_H_
