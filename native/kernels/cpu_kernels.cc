#include "kernels/cpu_kernels.h"

#include <algorithm>
#include <stdexcept>

namespace pdserve {
namespace {

constexpr size_t kRangesPerThread = 4;  // lets a thread that lost its core for a while do less
constexpr size_t kRowGrain = 16;

std::vector<const KernelTable*> Tables() {
  std::vector<const KernelTable*> tables;
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) {
    tables.push_back(&kAvx512Kernels);
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) tables.push_back(&kAvx2Kernels);
#endif
  tables.push_back(&kBaselineKernels);
  return tables;
}

const KernelTable& Select(const std::string& instruction_set) {
  for (const KernelTable* table : Tables()) {
    if (instruction_set.empty() || instruction_set == table->name) return *table;
  }
  throw std::invalid_argument("no kernels for this instruction set on this machine: " + instruction_set);
}

}  // namespace

CpuKernels::CpuKernels(size_t num_threads, const std::string& instruction_set)
    : table_(Select(instruction_set)), pool_(num_threads), scratch_(num_threads) {}

std::vector<std::string> CpuKernels::InstructionSets() {
  std::vector<std::string> names;
  for (const KernelTable* table : Tables()) names.emplace_back(table->name);
  return names;
}

template <typename Range>
void CpuKernels::Split(size_t count, size_t grain, const Range& range) {
  if (pool_.num_threads() == 1) return range(0, count);
  const size_t num_ranges = std::clamp<size_t>(count / grain, 1, pool_.num_threads() * kRangesPerThread);
  pool_.Run(num_ranges, [&](size_t i, size_t) { range(count * i / num_ranges, count * (i + 1) / num_ranges); });
}

void CpuKernels::Linear(const float* x, size_t rows, const PackedMatrix& weight, float* out, bool adds) {
  const Epilogue epilogue = weight.is_swiglu() ? Epilogue::kSwiglu : adds ? Epilogue::kAdd : Epilogue::kStore;
  const LinearArgs args = {x,    weight.depth(), weight.panels(),      weight.bias(), out, weight.out_columns(),
                           rows, weight.depth(), weight.out_columns(), epilogue};
  Split(weight.num_panels(), 1, [&](size_t first, size_t last) { table_.linear(args, first, last); });
}

void CpuKernels::RmsNorm(const RmsNormArgs& args, size_t rows) {
  Split(rows, kRowGrain, [&](size_t first, size_t last) { table_.rms_norm(args, first, last); });
}

void CpuKernels::Append(const AppendArgs& args, const PassPlan& plan) {
  Split(plan.num_tokens(), kRowGrain, [&](size_t first, size_t last) { table_.append(args, first, last); });
}

void CpuKernels::Attend(const AttendArgs& args, const PassPlan& plan) {
  for (std::vector<float>& scratch : scratch_) scratch.resize(AttendScratchFloats(args.pages.head_dim));
  pool_.Run(plan.tasks().size(),
            [&](size_t task, size_t thread) { table_.attend(args, plan.tasks()[task], scratch_[thread].data()); });
}

}  // namespace pdserve
