// Attention of a block of queries over the pages of one key head, with a running softmax.
//
// Rows (tokens times the query heads that share the key head) are the lanes: the maximum and the sum of a row never
// cross lanes, and one load of a key serves all rows. Keys are taken in tiles that start at multiples of 16 slots of a
// page, from position 0 on, whatever the chunk: with a masked key contributing an exact zero, a row's result depends on
// its query and on the keys it sees, and on nothing else.

#ifndef PDSERVE_KERNELS_ATTEND_H_
#define PDSERVE_KERNELS_ATTEND_H_

#include "kernels/kernel_table.h"
#include "kernels/vector.h"

namespace pdserve::PDSERVE_ISA {

constexpr int kScoreVecs = kRegisters == 32 ? 3 : 2;  // lanes of rows taken at once
constexpr int kScoreKeys = kRegisters == 32 ? 8 : 4;  // keys taken at once
constexpr int kOutRows = kRegisters == 32 ? 6 : 3;
constexpr int kOutVecs = 4;

struct AttendScratch {
  float* queries;  // [dim][kAttendRows], scaled
  float* out;      // [kAttendRows][dim]
  float* scores;   // [kAttendKeys][kAttendRows]
  float* max;      // [kAttendRows]
  float* sum;
  float* factor;   // by which this tile shrinks what was summed before
  float* visible;  // keys that the row sees

  AttendScratch(float* scratch, size_t dim)
      : queries(scratch),
        out(queries + kAttendRows * dim),
        scores(out + kAttendRows * dim),
        max(scores + kAttendKeys * kAttendRows),
        sum(max + kAttendRows),
        factor(sum + kAttendRows),
        visible(factor + kAttendRows) {}
};

// Up to 16 slots of one head of one page, and where the next tile is, to be fetched meanwhile: the hardware's
// prefetcher stops at the end of a page, and a decode step does little with each.
struct KeyTile {
  const float* keys;    // [num_keys][dim]
  const float* values;  // [num_keys][dim]
  const float* next_keys;
  const float* next_values;
  size_t dim;
  size_t first_key;  // its position in the sequence
  size_t num_keys;
};

template <int kKeys, int kVecs>
PDSERVE_INLINE void ScoreTile(const AttendScratch& scratch, const KeyTile& tile, size_t key, size_t lane) {
  const float* keys = tile.keys + key * tile.dim;
  const size_t dim = tile.dim;
  Vec sums[kKeys][kVecs] = {};
  for (size_t d = 0; d < dim; ++d) {
    __builtin_prefetch(tile.next_keys + d * kAttendKeys);
    Vec query[kVecs];
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) query[v] = Load(scratch.queries + d * kAttendRows + lane + v * kLanes);
#pragma GCC unroll 16
    for (int k = 0; k < kKeys; ++k) {
      const Vec element = Splat(keys[k * dim + d]);
#pragma GCC unroll 4
      for (int v = 0; v < kVecs; ++v) sums[k][v] += element * query[v];
    }
  }
  for (int k = 0; k < kKeys; ++k) {
    for (int v = 0; v < kVecs; ++v) Store(scratch.scores + (key + k) * kAttendRows + lane + v * kLanes, sums[k][v]);
  }
}

template <int kVecs>
PDSERVE_INLINE void ScoreLanes(const AttendScratch& scratch, const KeyTile& tile, size_t lane) {
  constexpr int kKeys = kVecs == 1 ? 2 * kScoreKeys : kScoreKeys;
  size_t key = 0;
  for (; key + kKeys <= tile.num_keys; key += kKeys) ScoreTile<kKeys, kVecs>(scratch, tile, key, lane);
  for (; key < tile.num_keys; ++key) ScoreTile<1, kVecs>(scratch, tile, key, lane);
}

static void Scores(const AttendScratch& scratch, const KeyTile& tile, size_t num_lanes) {
  size_t lane = 0;
  for (; lane + kScoreVecs * kLanes <= num_lanes; lane += kScoreVecs * kLanes) {
    ScoreLanes<kScoreVecs>(scratch, tile, lane);
  }
  for (; lane < num_lanes; lane += kLanes) ScoreLanes<1>(scratch, tile, lane);
}

// Turns scores into weights and moves maximum and sum on. Returns whether any row's factor differs from 1.
static bool Softmax(const AttendScratch& scratch, const KeyTile& tile, size_t num_lanes) {
  bool shrinks = false;
  for (size_t lane = 0; lane < num_lanes; lane += kLanes) {
    const Vec visible = Load(scratch.visible + lane);
    const Vec old_max = Load(scratch.max + lane);
    Vec max = old_max;
    for (size_t k = 0; k < tile.num_keys; ++k) {
      float* scores = scratch.scores + k * kAttendRows + lane;
      const Vec masked =
          Splat(static_cast<float>(tile.first_key + k)) < visible ? Load(scores) : Splat(-__builtin_inff());
      Store(scores, masked);
      max = Max(max, masked);
    }
    const Vec factor = Exp(old_max - max);
    Vec sum = Load(scratch.sum + lane) * factor;
    for (size_t k = 0; k < tile.num_keys; ++k) {
      float* scores = scratch.scores + k * kAttendRows + lane;
      const Vec weight = Exp(Load(scores) - max);
      Store(scores, weight);
      sum += weight;
    }
    Store(scratch.max + lane, max);
    Store(scratch.sum + lane, sum);
    Store(scratch.factor + lane, factor);
    for (int i = 0; i < kLanes; ++i) shrinks |= factor[i] != 1.0f;
  }
  return shrinks;
}

template <int kRows, int kVecs>
PDSERVE_INLINE void AccumulateTile(const AttendScratch& scratch, const KeyTile& tile, size_t row, size_t column,
                                   bool shrinks) {
  const size_t dim = tile.dim;
  Vec sums[kRows][kVecs];
  for (int r = 0; r < kRows; ++r) {
    const Vec factor = Splat(shrinks ? scratch.factor[row + r] : 1.0f);
    for (int v = 0; v < kVecs; ++v) sums[r][v] = Load(scratch.out + (row + r) * dim + column + v * kLanes) * factor;
  }
  for (size_t k = 0; k < tile.num_keys; ++k) {
    for (int v = 0; v < kVecs * kLanes; v += kAttendKeys) {
      __builtin_prefetch(tile.next_values + k * dim + column + v);
    }
    Vec value[kVecs];
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) value[v] = Load(tile.values + k * dim + column + v * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const Vec weight = Splat(scratch.scores[k * kAttendRows + row + r]);
#pragma GCC unroll 4
      for (int v = 0; v < kVecs; ++v) sums[r][v] += weight * value[v];
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVecs; ++v) Store(scratch.out + (row + r) * dim + column + v * kLanes, sums[r][v]);
  }
}

template <int kRows>
PDSERVE_INLINE void AccumulateRows(const AttendScratch& scratch, const KeyTile& tile, size_t row, bool shrinks) {
  size_t column = 0;
  for (; column + kOutVecs * kLanes <= tile.dim; column += kOutVecs * kLanes) {
    AccumulateTile<kRows, kOutVecs>(scratch, tile, row, column, shrinks);
  }
  for (; column < tile.dim; column += kLanes) AccumulateTile<kRows, 1>(scratch, tile, row, column, shrinks);
}

static void Accumulate(const AttendScratch& scratch, const KeyTile& tile, size_t num_rows, bool shrinks) {
  size_t row = 0;
  for (; row + kOutRows <= num_rows; row += kOutRows) AccumulateRows<kOutRows>(scratch, tile, row, shrinks);
  for (; row + 3 <= num_rows; row += 3) AccumulateRows<3>(scratch, tile, row, shrinks);
  for (; row < num_rows; ++row) AccumulateRows<1>(scratch, tile, row, shrinks);
}

static void LoadQueries(const AttendArgs& args, const AttendTask& task, const AttendScratch& scratch, size_t group,
                        size_t num_lanes) {
  const size_t dim = args.pages.head_dim;
  for (size_t lane = 0; lane < num_lanes; ++lane) {
    const bool used = lane < task.num_tokens * group;
    const size_t token = used ? lane / group : 0;
    const float* query = args.qkv + (task.first_row + token) * args.qkv_stride +
                         (task.kv_head * group + (used ? lane % group : 0)) * dim;
    for (size_t d = 0; d < dim; ++d) scratch.queries[d * kAttendRows + lane] = query[d] * args.scale;
    scratch.max[lane] = -__builtin_inff();
    scratch.sum[lane] = 0.0f;
    scratch.visible[lane] = static_cast<float>(task.first_position + token + 1);
  }
}

// Requires: position below num_positions.
static KeyTile TileAt(const AttendArgs& args, const AttendTask& task, size_t position, size_t num_positions) {
  const PagesArgs& pages = args.pages;
  const auto keys_at = [&](size_t key) {
    const size_t page = static_cast<size_t>(task.page_table[key / pages.page_slots]);
    return pages.Head(page, task.kv_head) + key % pages.page_slots * pages.head_dim;
  };
  const size_t page_rest = pages.page_slots - position % pages.page_slots;
  const size_t rest = num_positions - position < page_rest ? num_positions - position : page_rest;
  const size_t num_keys = rest < kAttendKeys ? rest : kAttendKeys;
  const size_t next = position + num_keys < num_positions ? position + num_keys : position;
  const size_t values_offset = pages.page_slots * pages.head_dim;
  const float* keys = keys_at(position);
  const float* next_keys = keys_at(next);
  return {keys, keys + values_offset, next_keys, next_keys + values_offset, pages.head_dim, position, num_keys};
}

static void Attend(const AttendArgs& args, const AttendTask& task, float* memory) {
  const size_t dim = args.pages.head_dim;
  const size_t group = args.heads / args.pages.kv_heads;
  const size_t num_rows = task.num_tokens * group;
  const size_t num_lanes = (num_rows + kLanes - 1) / kLanes * kLanes;
  const size_t num_positions = task.first_position + task.num_tokens;
  const AttendScratch scratch(memory, dim);
  LoadQueries(args, task, scratch, group, num_lanes);
  for (size_t i = 0; i < num_rows * dim; ++i) scratch.out[i] = 0.0f;
  for (size_t position = 0; position < num_positions;) {
    const KeyTile tile = TileAt(args, task, position, num_positions);
    Scores(scratch, tile, num_lanes);
    const bool shrinks = Softmax(scratch, tile, num_lanes);
    Accumulate(scratch, tile, num_rows, shrinks);
    position += tile.num_keys;
  }
  for (size_t row = 0; row < num_rows; ++row) {
    float* out =
        args.out + (task.first_row + row / group) * args.out_stride + (task.kv_head * group + row % group) * dim;
    const Vec inverse = Splat(1.0f / scratch.sum[row]);
    for (size_t d = 0; d < dim; d += kLanes) Store(out + d, Load(scratch.out + row * dim + d) * inverse);
  }
}

}  // namespace pdserve::PDSERVE_ISA

#endif  // PDSERVE_KERNELS_ATTEND_H_
