// Root mean square norms, rotary embedding, and the append of keys and values to their pages.

#ifndef PDSERVE_KERNELS_NORM_APPEND_H_
#define PDSERVE_KERNELS_NORM_APPEND_H_

#include "kernels/kernel_table.h"
#include "kernels/vector.h"

namespace pdserve::PDSERVE_ISA {

// Requires: dim is a multiple of 16.
PDSERVE_INLINE float InverseRms(const float* x, size_t dim, float eps) {
  Vec sums[kBlockVecs] = {};
  for (size_t i = 0; i < dim; i += kBlockLanes) {
    for (int v = 0; v < kBlockVecs; ++v) {
      const Vec value = Load(x + i + v * kLanes);
      sums[v] += value * value;
    }
  }
  return 1.0f / __builtin_sqrtf(SumBlock(sums) / static_cast<float>(dim) + eps);
}

PDSERVE_INLINE void NormRow(const float* x, const float* weight, float* out, size_t dim, float eps) {
  const Vec scale = Splat(InverseRms(x, dim, eps));
  for (size_t i = 0; i < dim; i += kLanes) Store(out + i, Load(x + i) * scale * Load(weight + i));
}

static void RmsNorm(const RmsNormArgs& args, size_t first_row, size_t last_row) {
  for (size_t row = first_row; row < last_row; ++row) {
    NormRow(args.x + row * args.x_stride, args.weight, args.out + row * args.out_stride, args.dim, args.eps);
  }
}

// Half-split form: lane i turns with lane i + half. `from` and `to` may be the same.
PDSERVE_INLINE void Rotate(const float* from, float* to, const float* cos, const float* sin, size_t half) {
  constexpr size_t kStep = kLanes < 8 ? kLanes : 8;
  typedef float Part __attribute__((vector_size(kStep * sizeof(float))));
  for (size_t i = 0; i < half; i += kStep) {
    Part first, second, c, s;
    __builtin_memcpy(&first, from + i, sizeof(Part));
    __builtin_memcpy(&second, from + half + i, sizeof(Part));
    __builtin_memcpy(&c, cos + i, sizeof(Part));
    __builtin_memcpy(&s, sin + i, sizeof(Part));
    const Part turned_first = first * c - second * s;
    const Part turned_second = second * c + first * s;
    __builtin_memcpy(to + i, &turned_first, sizeof(Part));
    __builtin_memcpy(to + half + i, &turned_second, sizeof(Part));
  }
}

static void Append(const AppendArgs& args, size_t first_token, size_t last_token) {
  const PagesArgs& pages = args.pages;
  const size_t dim = pages.head_dim, half = dim / 2;
  for (size_t token = first_token; token < last_token; ++token) {
    const size_t position = static_cast<size_t>(args.positions[token]);
    const size_t page = static_cast<size_t>(args.pages_of_tokens[token]);
    const size_t slot = position % pages.page_slots;
    const float* cos = args.cos + position * half;
    const float* sin = args.sin + position * half;
    float* queries = args.qkv + token * args.qkv_stride;
    float* keys = queries + args.heads * dim;
    const float* values = keys + pages.kv_heads * dim;
    for (size_t head = 0; head < args.heads; ++head) {
      float* query = queries + head * dim;
      if (args.q_norm != nullptr) NormRow(query, args.q_norm, query, dim, args.eps);
      Rotate(query, query, cos, sin, half);
    }
    for (size_t head = 0; head < pages.kv_heads; ++head) {
      float* key = keys + head * dim;
      float* page_head = pages.Head(page, head);
      if (args.k_norm != nullptr) NormRow(key, args.k_norm, key, dim, args.eps);
      Rotate(key, page_head + slot * dim, cos, sin, half);
      __builtin_memcpy(page_head + (pages.page_slots + slot) * dim, values + head * dim, dim * sizeof(float));
    }
  }
}

}  // namespace pdserve::PDSERVE_ISA

#endif  // PDSERVE_KERNELS_NORM_APPEND_H_
