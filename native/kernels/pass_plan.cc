#include "kernels/pass_plan.h"

#include <algorithm>
#include <stdexcept>

namespace pdserve {

PassPlan::PassPlan(const PoolShape& shape, const int32_t* starts, const int32_t* lengths, size_t num_chunks,
                   const int32_t* page_tables, size_t table_stride)
    : shape_(shape), page_tables_(page_tables, page_tables + num_chunks * table_stride) {
  if (shape.heads / shape.kv_heads > kAttendRows) throw std::invalid_argument("too many query heads share a key head");
  for (size_t chunk = 0; chunk < num_chunks; ++chunk) {
    const int64_t start = starts[chunk], stop = start + lengths[chunk];
    if (start < 0 || lengths[chunk] < 1 || stop > static_cast<int64_t>(shape.num_positions)) {
      throw std::invalid_argument("a chunk is empty or outside the positions of the model");
    }
    if (stop > static_cast<int64_t>(table_stride * shape.page_slots)) {
      throw std::invalid_argument("a page table is shorter than its chunk");
    }
    AddChunk(static_cast<size_t>(start), static_cast<size_t>(lengths[chunk]),
             page_tables_.data() + chunk * table_stride);
  }
}

void PassPlan::AddChunk(size_t start, size_t length, const int32_t* page_table) {
  const size_t stop = start + length;
  for (size_t i = 0; i * shape_.page_slots < stop; ++i) {
    if (page_table[i] < 0 || static_cast<size_t>(page_table[i]) >= shape_.num_pages) {
      throw std::invalid_argument("a page is outside the pool");
    }
  }
  const size_t first_row = positions_.size();
  for (size_t position = start; position < stop; ++position) {
    positions_.push_back(static_cast<int32_t>(position));
    pages_of_tokens_.push_back(page_table[position / shape_.page_slots]);
  }
  const size_t block_tokens = kAttendRows / (shape_.heads / shape_.kv_heads);
  for (size_t kv_head = 0; kv_head < shape_.kv_heads; ++kv_head) {
    for (size_t token = 0; token < length; token += block_tokens) {
      tasks_.push_back({page_table, first_row + token, start + token, std::min(block_tokens, length - token), kv_head});
    }
  }
}

}  // namespace pdserve
