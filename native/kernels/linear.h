// Products with packed matrices. A tile of rows times one panel is held in registers over the whole depth.

#ifndef PDSERVE_KERNELS_LINEAR_H_
#define PDSERVE_KERNELS_LINEAR_H_

#include "kernels/kernel_table.h"
#include "kernels/vector.h"

namespace pdserve::PDSERVE_ISA {

constexpr int kPanelVecs = kPanelColumns / kLanes;
constexpr int kHalfVecs = kPanelVecs / 2;
constexpr int kAccumulators = kRegisters == 32 ? 24 : 12;
constexpr int kHighTileVecs = kRegisters == 32 && kLanes < 16 ? 4 : 2;
constexpr int kTileRows = kAccumulators / kHighTileVecs;
constexpr int kWideTileRows = kAccumulators / kPanelVecs > 0 ? kAccumulators / kPanelVecs : 1;
// Up to so many rows, the time goes to reading the panel from memory.
constexpr size_t kFewRows = 12;

// A tile of few rows takes the whole width of the panel at once, so that memory is read in one stream; a high one takes
// it in parts of a cache line or more, so that the panel is read less often for the same sums.
template <int kRows>
constexpr int kPartVecs = kRows * kPanelVecs <= kAccumulators ? kPanelVecs : kHighTileVecs;

// Rows of x that are multiplied with all panels before the next rows come: they stay in the second-level cache.
constexpr size_t kRowBlock = 192;

template <int kRows>
PDSERVE_INLINE void Finish(const LinearArgs& args, size_t row, size_t panel, Vec (&sums)[kRows][kPanelVecs]) {
  const bool swiglu = args.epilogue == Epilogue::kSwiglu;
  const size_t width = swiglu ? kSwigluColumns : kPanelColumns;
  const size_t column = panel * width;
  const size_t num_columns = args.out_columns - column < width ? args.out_columns - column : width;
  for (int r = 0; r < kRows; ++r) {
    float* out = args.out + (row + r) * args.out_stride + column;
    Vec values[kPanelVecs];
    for (int v = 0; v < kPanelVecs; ++v) values[v] = sums[r][v];
    if (args.bias != nullptr) {
      for (int v = 0; v < kPanelVecs; ++v) values[v] += Load(args.bias + panel * kPanelColumns + v * kLanes);
    }
    if (swiglu) {
      for (int v = 0; v < kHalfVecs; ++v) values[v] = Silu(values[v]) * values[v + kHalfVecs];
    }
    if (num_columns == width) {
      const int num_vecs = swiglu ? kHalfVecs : kPanelVecs;
      for (int v = 0; v < num_vecs; ++v) {
        Store(out + v * kLanes, args.epilogue == Epilogue::kAdd ? Load(out + v * kLanes) + values[v] : values[v]);
      }
      continue;
    }
    float lanes[kPanelColumns];
    for (int v = 0; v < kPanelVecs; ++v) Store(lanes + v * kLanes, values[v]);
    for (size_t c = 0; c < num_columns; ++c) out[c] = args.epilogue == Epilogue::kAdd ? out[c] + lanes[c] : lanes[c];
  }
}

// What a tile asks of the cache while it computes: the hardware's prefetcher alone leaves half the bandwidth unused.
struct Prefetch {
  const float* next_panel;  // where this tile's share of the next panel starts
  size_t floats_per_depth;  // of it for each step in depth; 0 when the panel is read only once
};

// Steps in depth between a load and its prefetch: 4 KiB of panel; 2 KiB and 8 KiB were slower.
constexpr size_t kPrefetchSteps = 32;
constexpr int kLineFloats = 16;

// Steps in depth that are summed on their own before they join the total, because the rounding error of a sum grows
// with its length: SmolLM2's logits are off by 4.7e-5 with blocks of 96 and by 8.6e-5 in one go, at the same speed.
constexpr size_t kDepthBlock = 96;

template <int kRows>
static void Tile(const LinearArgs& args, size_t row, size_t panel, const Prefetch& prefetch) {
  const float* x = args.x + row * args.x_stride;
  const float* next_panel = prefetch.next_panel;
  constexpr int kVecs = kPartVecs<kRows>;
  constexpr int kParts = kPanelVecs / kVecs;
  Vec totals[kRows][kPanelVecs] = {};
  for (int part = 0; part < kParts; ++part) {
    const float* columns = args.panels + panel * args.depth * kPanelColumns + part * kVecs * kLanes;
    for (size_t start = 0; start < args.depth; start += kDepthBlock) {
      const size_t stop = args.depth - start < kDepthBlock ? args.depth : start + kDepthBlock;
      Vec sums[kRows][kVecs] = {};
      for (size_t d = start; d < stop; ++d) {
        for (int lane = 0; lane < kVecs * kLanes; lane += kLineFloats) {
          __builtin_prefetch(columns + kPrefetchSteps * kPanelColumns + lane);
        }
        __builtin_prefetch(next_panel, 0, 2);
        next_panel += prefetch.floats_per_depth / kParts;
        Vec panel_row[kVecs];
#pragma GCC unroll 4
        for (int v = 0; v < kVecs; ++v) panel_row[v] = Load(columns + v * kLanes);
        columns += kPanelColumns;
#pragma GCC unroll 12
        for (int r = 0; r < kRows; ++r) {
          const Vec element = Splat(x[r * args.x_stride + d]);
#pragma GCC unroll 4
          for (int v = 0; v < kVecs; ++v) sums[r][v] += element * panel_row[v];
        }
      }
      for (int r = 0; r < kRows; ++r) {
        for (int v = 0; v < kVecs; ++v) totals[r][part * kVecs + v] += sums[r][v];
      }
    }
  }
  Finish<kRows>(args, row, panel, totals);
}

template <int kRows>
static void TileOfRows(const LinearArgs& args, size_t row, size_t num_rows, size_t panel, const Prefetch& prefetch) {
  if constexpr (kRows > 1) {
    if (num_rows < kRows) return TileOfRows<kRows - 1>(args, row, num_rows, panel, prefetch);
  }
  Tile<kRows>(args, row, panel, prefetch);
}

static void Linear(const LinearArgs& args, size_t first_panel, size_t last_panel) {
  const size_t panel_floats = args.depth * kPanelColumns;
  for (size_t block = 0; block < args.rows; block += kRowBlock) {
    const size_t block_rows = args.rows - block < kRowBlock ? args.rows - block : kRowBlock;
    const size_t tile_rows = block_rows <= kFewRows ? kWideTileRows : kTileRows;
    const size_t num_tiles = (block_rows + tile_rows - 1) / tile_rows;
    for (size_t panel = first_panel; panel < last_panel; ++panel) {
      for (size_t tile = 0; tile < num_tiles; ++tile) {
        // Tiles of nearly equal height: a last tile of one row would wait for its own sums.
        const size_t start = block_rows * tile / num_tiles;
        const size_t stop = block_rows * (tile + 1) / num_tiles;
        const Prefetch prefetch = {args.panels + (panel + 1) * panel_floats + panel_floats * tile / num_tiles,
                                   num_tiles == 1 ? 0 : kPanelColumns / num_tiles};
        TileOfRows<kTileRows>(args, block + start, stop - start, panel, prefetch);
      }
    }
  }
}

}  // namespace pdserve::PDSERVE_ISA

#endif  // PDSERVE_KERNELS_LINEAR_H_
