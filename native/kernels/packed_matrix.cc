#include "kernels/packed_matrix.h"

#include <sys/mman.h>

#include <algorithm>
#include <new>

#include "kernels/kernel_table.h"

namespace pdserve {
namespace {

float* MapPanels(size_t num_bytes) {
  if (num_bytes == 0) return nullptr;
  void* memory = mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  // Large pages spare a walk through the page table every 4 KiB of a stream; a kernel without them ignores this.
  madvise(memory, num_bytes, MADV_HUGEPAGE);
  return static_cast<float*>(memory);
}

size_t DivCeil(size_t dividend, size_t divisor) { return (dividend + divisor - 1) / divisor; }

}  // namespace

void PackedMatrix::Unmap::operator()(float* panels) const { munmap(panels, num_bytes); }

PackedMatrix::PackedMatrix(size_t num_panels, size_t depth, size_t out_columns, bool is_swiglu)
    : panels_(nullptr, Unmap{num_panels * depth * kPanelColumns * sizeof(float)}),
      num_panels_(num_panels),
      depth_(depth),
      out_columns_(out_columns),
      is_swiglu_(is_swiglu) {
  panels_.reset(MapPanels(panels_.get_deleter().num_bytes));
}

void PackedMatrix::CopyColumn(const float* weight_row, size_t panel, size_t lane) {
  float* to = panels_.get() + panel * depth_ * kPanelColumns + lane;
  for (size_t d = 0; d < depth_; ++d) to[d * kPanelColumns] = weight_row[d];
}

PackedMatrix PackedMatrix::Plain(const float* weight, const float* bias, size_t columns, size_t depth) {
  PackedMatrix packed(DivCeil(columns, kPanelColumns), depth, columns, false);
  for (size_t column = 0; column < columns; ++column) {
    packed.CopyColumn(weight + column * depth, column / kPanelColumns, column % kPanelColumns);
  }
  if (bias != nullptr) {
    packed.bias_ = std::make_unique<float[]>(packed.num_panels_ * kPanelColumns);
    std::copy_n(bias, columns, packed.bias_.get());
  }
  return packed;
}

PackedMatrix PackedMatrix::Swiglu(const float* gate, const float* up, size_t columns, size_t depth) {
  PackedMatrix packed(DivCeil(columns, kSwigluColumns), depth, columns, true);
  for (size_t column = 0; column < columns; ++column) {
    const size_t panel = column / kSwigluColumns, lane = column % kSwigluColumns;
    packed.CopyColumn(gate + column * depth, panel, lane);
    packed.CopyColumn(up + column * depth, panel, kSwigluColumns + lane);
  }
  return packed;
}

}  // namespace pdserve
