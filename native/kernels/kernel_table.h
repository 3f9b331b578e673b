// The kernels of one instruction set, and their arguments.
//
// Thread safety: kernels are pure functions of their arguments; ranges of work that do not overlap may run at once.
// Determinism: each output is summed in an order that depends on nothing but its own inputs, so a row's result does not
// depend on which other rows, tokens or sequences are in the pass, nor on the number of threads.

#ifndef PDSERVE_KERNELS_KERNEL_TABLE_H_
#define PDSERVE_KERNELS_KERNEL_TABLE_H_

#include <cstddef>
#include <cstdint>

namespace pdserve {

constexpr int kPanelColumns = 32;
constexpr int kSwigluColumns = kPanelColumns / 2;

enum class Epilogue {
  kStore,   // out = product + bias
  kAdd,     // out += product
  kSwiglu,  // out = silu(gate) * up, where a panel holds 16 gate and 16 up columns
};

// out[rows][columns] from x[rows][depth] and a packed matrix of panels [depth][32].
struct LinearArgs {
  const float* x;
  size_t x_stride;
  const float* panels;
  const float* bias;  // one a column, padded to whole panels; null for none
  float* out;
  size_t out_stride;
  size_t rows;
  size_t depth;
  size_t out_columns;
  Epilogue epilogue;
};

struct RmsNormArgs {
  const float* x;
  size_t x_stride;
  const float* weight;
  float* out;
  size_t out_stride;
  size_t dim;
  float eps;
};

// One layer of the paged KV cache: [page][head][K, V][slot][dim].
struct PagesArgs {
  float* base;
  size_t kv_heads;
  size_t page_slots;
  size_t head_dim;

  float* Head(size_t page, size_t head) const { return base + (page * kv_heads + head) * 2 * page_slots * head_dim; }
};

// Rows of qkv: query heads, then key heads, then value heads, each of head_dim.
struct AppendArgs {
  PagesArgs pages;
  float* qkv;  // query heads are normed and rotated in place
  size_t qkv_stride;
  size_t heads;
  const float* q_norm;  // null without query and key norms
  const float* k_norm;
  float eps;
  const float* cos;  // [position][head_dim / 2]
  const float* sin;
  const int32_t* positions;  // of each token
  const int32_t* pages_of_tokens;
};

// Queries of consecutive tokens of one chunk against one key head.
struct AttendTask {
  const int32_t* page_table;
  size_t first_row;  // in qkv and out
  size_t first_position;
  size_t num_tokens;
  size_t kv_head;
};

struct AttendArgs {
  PagesArgs pages;
  const float* qkv;
  size_t qkv_stride;
  float* out;
  size_t out_stride;
  size_t heads;
  float scale;
};

struct KernelTable {
  const char* name;
  void (*linear)(const LinearArgs&, size_t first_panel, size_t last_panel);
  void (*rms_norm)(const RmsNormArgs&, size_t first_row, size_t last_row);
  void (*append)(const AppendArgs&, size_t first_token, size_t last_token);
  // Scratch: at least AttendScratchFloats.
  void (*attend)(const AttendArgs&, const AttendTask&, float* scratch);
};

// Rows (tokens times query heads of one key head) that one attend task takes at most.
constexpr size_t kAttendRows = 48;
constexpr size_t kAttendKeys = 16;

constexpr size_t AttendScratchFloats(size_t head_dim) { return kAttendRows * (2 * head_dim + kAttendKeys + 4); }

extern const KernelTable kBaselineKernels;
#if defined(__x86_64__)
extern const KernelTable kAvx2Kernels;
extern const KernelTable kAvx512Kernels;
#endif

}  // namespace pdserve

#endif  // PDSERVE_KERNELS_KERNEL_TABLE_H_
