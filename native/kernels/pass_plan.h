// Where the tokens of one pass are: their positions, their pages, and the attention tasks that cover them.

#ifndef PDSERVE_KERNELS_PASS_PLAN_H_
#define PDSERVE_KERNELS_PASS_PLAN_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/kernel_table.h"

namespace pdserve {

// The extents that a plan's indices are checked against.
struct PoolShape {
  size_t num_pages;
  size_t page_slots;
  size_t num_positions;  // of the rotary tables
  size_t heads;
  size_t kv_heads;

  bool operator==(const PoolShape&) const = default;
};

// Thread safety: const after construction.
class PassPlan {
 public:
  // Chunk c computes tokens [starts[c], starts[c] + lengths[c]) of its sequence, whose pages are
  // page_tables[c * table_stride ...]. Throws std::invalid_argument for an index outside `shape`.
  PassPlan(const PoolShape& shape, const int32_t* starts, const int32_t* lengths, size_t num_chunks,
           const int32_t* page_tables, size_t table_stride);
  // Tasks point into the plan's own page tables: moving keeps those where they are, copying would not.
  PassPlan(PassPlan&&) = default;
  PassPlan(const PassPlan&) = delete;

  const PoolShape& shape() const { return shape_; }
  size_t num_tokens() const { return positions_.size(); }
  const int32_t* positions() const { return positions_.data(); }
  const int32_t* pages_of_tokens() const { return pages_of_tokens_.data(); }
  const std::vector<AttendTask>& tasks() const { return tasks_; }

 private:
  void AddChunk(size_t start, size_t length, const int32_t* page_table);

  PoolShape shape_;
  std::vector<int32_t> page_tables_;
  std::vector<int32_t> positions_;
  std::vector<int32_t> pages_of_tokens_;
  std::vector<AttendTask> tasks_;
};

}  // namespace pdserve

#endif  // PDSERVE_KERNELS_PASS_PLAN_H_
