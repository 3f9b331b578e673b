// A weight matrix in the order in which the kernels read it.

#ifndef PDSERVE_KERNELS_PACKED_MATRIX_H_
#define PDSERVE_KERNELS_PACKED_MATRIX_H_

#include <cstddef>
#include <memory>

namespace pdserve {

// Panels of 32 output columns, each [depth][32], one after another; missing columns of the last are zero.
// There may be none: with more ranks than blocks of columns, a rank's share of a product is empty.
//
// Thread safety: const after construction.
class PackedMatrix {
 public:
  // From weight[columns][depth], row-major, and bias[columns] or null.
  static PackedMatrix Plain(const float* weight, const float* bias, size_t columns, size_t depth);
  // Each panel holds 16 columns of gate, then the same 16 of up, both [columns][depth].
  static PackedMatrix Swiglu(const float* gate, const float* up, size_t columns, size_t depth);

  const float* panels() const { return panels_.get(); }
  const float* bias() const { return bias_.get(); }
  size_t num_panels() const { return num_panels_; }
  size_t depth() const { return depth_; }
  // Columns of the product, after the epilogue.
  size_t out_columns() const { return out_columns_; }
  bool is_swiglu() const { return is_swiglu_; }

 private:
  struct Unmap {
    size_t num_bytes;
    void operator()(float* panels) const;
  };

  PackedMatrix(size_t num_panels, size_t depth, size_t out_columns, bool is_swiglu);
  void CopyColumn(const float* weight_row, size_t panel, size_t lane);

  std::unique_ptr<float[], Unmap> panels_;
  std::unique_ptr<float[]> bias_;
  size_t num_panels_;
  size_t depth_;
  size_t out_columns_;
  bool is_swiglu_;
};

}  // namespace pdserve

#endif  // PDSERVE_KERNELS_PACKED_MATRIX_H_
