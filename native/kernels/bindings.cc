// The only file of the kernels that sees Python. It checks every extent: the kernels trust their arguments.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cmath>
#include <optional>

#include "kernels/cpu_kernels.h"
#include "layer_counter/layer_counter.h"

namespace nb = nanobind;

namespace pdserve {
namespace {

using Bytes = nb::ndarray<uint8_t, nb::numpy, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Vector = nb::ndarray<const float, nb::numpy, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using ConstMatrix = nb::ndarray<const float, nb::numpy, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Matrix = nb::ndarray<float, nb::numpy, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using IntVector = nb::ndarray<const int32_t, nb::numpy, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using IntMatrix = nb::ndarray<const int32_t, nb::numpy, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using PageArray = nb::ndarray<float, nb::numpy, nb::ndim<6>, nb::c_contig, nb::device::cpu>;

constexpr size_t kDimMultiple = 16;

void Require(bool holds, const char* what) {
  if (!holds) throw nb::value_error(what);
}

// Keeps the region mapped for as long as it can tick.
class CounterTicker {
 public:
  explicit CounterTicker(Bytes region) : region_(region) {
    Require(region.size() >= sizeof(LayerCounter), "the region is too small for a layer counter");
  }

  void Tick() { counter()->Tick(); }
  uint64_t ticks() const { return counter()->ticks.load(std::memory_order_acquire); }

 private:
  LayerCounter* counter() const { return reinterpret_cast<LayerCounter*>(region_.data()); }

  Bytes region_;
};

// The pages of all layers, and the rotary tables of the positions they hold.
class PagedCache {
 public:
  PagedCache(PageArray pages, ConstMatrix cos, ConstMatrix sin, size_t num_heads)
      : pages_(pages), cos_(cos), sin_(sin), num_heads_(num_heads) {
    Require(pages.shape(3) == 2, "pages must be [layer][page][head][K, V][slot][dim]");
    Require(head_dim() % kDimMultiple == 0, "the head dimension must be a multiple of 16");
    Require(cos.shape(1) == head_dim() / 2 && sin.shape(1) == cos.shape(1) && sin.shape(0) == cos.shape(0),
            "rotary tables must be [position][head_dim / 2]");
    Require(num_heads > 0 && num_heads % pages.shape(2) == 0, "query heads must be a multiple of key heads");
  }

  size_t head_dim() const { return pages_.shape(5); }
  size_t qkv_columns() const { return (num_heads_ + 2 * pages_.shape(2)) * head_dim(); }

  PassPlan Plan(IntVector starts, IntVector lengths, IntMatrix page_tables) const {
    Require(starts.shape(0) == lengths.shape(0) && starts.shape(0) == page_tables.shape(0),
            "starts, lengths and page tables must have one row a chunk");
    return PassPlan(Shape(), starts.data(), lengths.data(), starts.shape(0), page_tables.data(), page_tables.shape(1));
  }

  PoolShape Shape() const { return {pages_.shape(1), pages_.shape(4), cos_.shape(0), num_heads_, pages_.shape(2)}; }

  PagesArgs Layer(size_t layer_index) const {
    Require(layer_index < pages_.shape(0), "the cache has no such layer");
    const size_t layer_floats = pages_.size() / pages_.shape(0);
    return {pages_.data() + layer_index * layer_floats, pages_.shape(2), pages_.shape(4), head_dim()};
  }

  AppendArgs Append(const PassPlan& plan, size_t layer_index, Matrix qkv, const std::optional<Vector>& q_norm,
                    const std::optional<Vector>& k_norm, float eps) const {
    RequirePass(plan, qkv);
    Require(q_norm.has_value() == k_norm.has_value(), "queries and keys are normed both or neither");
    Require(!q_norm || (q_norm->shape(0) == head_dim() && k_norm->shape(0) == head_dim()),
            "query and key norms must have head_dim weights");
    return {Layer(layer_index),
            qkv.data(),
            qkv.shape(1),
            num_heads_,
            q_norm ? q_norm->data() : nullptr,
            k_norm ? k_norm->data() : nullptr,
            eps,
            cos_.data(),
            sin_.data(),
            plan.positions(),
            plan.pages_of_tokens()};
  }

  AttendArgs Attend(const PassPlan& plan, size_t layer_index, Matrix qkv, Matrix out) const {
    RequirePass(plan, qkv);
    Require(out.shape(0) == plan.num_tokens() && out.shape(1) == num_heads_ * head_dim(),
            "out has other extents than the pass");
    const float scale = 1.0f / std::sqrt(static_cast<float>(head_dim()));
    return {Layer(layer_index), qkv.data(), qkv.shape(1), out.data(), out.shape(1), num_heads_, scale};
  }

 private:
  void RequirePass(const PassPlan& plan, const Matrix& qkv) const {
    Require(plan.shape() == Shape(), "the pass was planned for another cache");
    Require(qkv.shape(0) == plan.num_tokens() && qkv.shape(1) == qkv_columns(), "qkv has other extents than the pass");
  }

  PageArray pages_;
  ConstMatrix cos_;
  ConstMatrix sin_;
  size_t num_heads_;
};

PackedMatrix PackPlain(ConstMatrix weight, const std::optional<Vector>& bias) {
  Require(!bias || bias->shape(0) == weight.shape(0), "bias and weight differ in columns");
  return PackedMatrix::Plain(weight.data(), bias ? bias->data() : nullptr, weight.shape(0), weight.shape(1));
}

PackedMatrix PackSwiglu(ConstMatrix gate, ConstMatrix up) {
  Require(gate.shape(0) == up.shape(0) && gate.shape(1) == up.shape(1), "gate and up differ in extents");
  return PackedMatrix::Swiglu(gate.data(), up.data(), gate.shape(0), gate.shape(1));
}

void Linear(CpuKernels& kernels, ConstMatrix x, const PackedMatrix& weight, Matrix out, bool adds) {
  Require(x.shape(1) == weight.depth(), "x and weight differ in depth");
  Require(out.shape(0) == x.shape(0) && out.shape(1) == weight.out_columns(), "out has other extents than the product");
  Require(!(adds && weight.is_swiglu()), "a gated product can't be added");
  kernels.Linear(x.data(), x.shape(0), weight, out.data(), adds);
}

void RmsNorm(CpuKernels& kernels, ConstMatrix x, Vector weight, Matrix out, float eps) {
  Require(x.shape(1) % kDimMultiple == 0, "the dimension must be a multiple of 16");
  Require(weight.shape(0) == x.shape(1) && out.shape(0) == x.shape(0) && out.shape(1) == x.shape(1),
          "x, weight and out differ in extents");
  const RmsNormArgs args = {x.data(), x.shape(1), weight.data(), out.data(), out.shape(1), x.shape(1), eps};
  kernels.RmsNorm(args, x.shape(0));
}

}  // namespace
}  // namespace pdserve

NB_MODULE(_kernels, m) {
  using namespace pdserve;
  m.doc() = "CPU kernels of the engine, and the tick of the layer counter.";

  nb::class_<CounterTicker>(m, "CounterTicker", "The ticking end of a layer counter region.")
      .def(nb::init<Bytes>(), nb::arg("region"))
      .def("tick", &CounterTicker::Tick, "Count one layer, or the end of a pass, and wake who waits.")
      .def_prop_ro("ticks", &CounterTicker::ticks);

  nb::class_<PackedMatrix>(m, "PackedMatrix", "A weight matrix in the order in which the kernels read it.")
      .def_static("plain", &PackPlain, nb::arg("weight"), nb::arg("bias") = nb::none())
      .def_static("swiglu", &PackSwiglu, nb::arg("gate"), nb::arg("up"));

  nb::class_<PassPlan>(m, "PassPlan", "Positions, pages and attention tasks of the tokens of one pass.")
      .def_prop_ro("num_tokens", &PassPlan::num_tokens);

  nb::class_<PagedCache>(m, "PagedCache", "Pages [layer][page][head][K, V][slot][dim] with their rotary tables.")
      .def(nb::init<PageArray, ConstMatrix, ConstMatrix, size_t>(), nb::arg("pages"), nb::arg("cos"), nb::arg("sin"),
           nb::kw_only(), nb::arg("num_heads"))
      .def("plan", &PagedCache::Plan, nb::arg("starts"), nb::arg("lengths"), nb::arg("page_tables"),
           "Raises: ValueError for a position, page table or page outside the cache.");

  nb::class_<CpuKernels>(m, "CpuKernels", "The kernels of one instruction set on a pool of threads.")
      .def(nb::init<size_t, std::string>(), nb::arg("num_threads"), nb::arg("instruction_set") = "")
      .def_static("instruction_sets", &CpuKernels::InstructionSets, "What this machine can run, best first.")
      .def_prop_ro("instruction_set", &CpuKernels::instruction_set)
      .def(
          "linear",
          [](CpuKernels& kernels, ConstMatrix x, const PackedMatrix& weight, Matrix out) {
            Linear(kernels, x, weight, out, false);
          },
          nb::arg("x"), nb::arg("weight"), nb::arg("out"), "out = x W^T + bias, or silu(x G^T) * (x U^T).")
      .def(
          "linear_add",
          [](CpuKernels& kernels, ConstMatrix x, const PackedMatrix& weight, Matrix out) {
            Linear(kernels, x, weight, out, true);
          },
          nb::arg("x"), nb::arg("weight"), nb::arg("out"), "out += x W^T + bias.")
      .def("rms_norm", &RmsNorm, nb::arg("x"), nb::arg("weight"), nb::arg("out"), nb::arg("eps"))
      .def(
          "append",
          [](CpuKernels& kernels, const PagedCache& cache, const PassPlan& plan, size_t layer_index, Matrix qkv,
             std::optional<Vector> q_norm, std::optional<Vector> k_norm,
             float eps) { kernels.Append(cache.Append(plan, layer_index, qkv, q_norm, k_norm, eps), plan); },
          nb::arg("cache"), nb::arg("plan"), nb::arg("layer_index"), nb::arg("qkv"), nb::arg("q_norm") = nb::none(),
          nb::arg("k_norm") = nb::none(), nb::arg("eps") = 0.0f,
          "Norm and rotate queries in place; write keys and values into their pages.")
      .def(
          "attend",
          [](CpuKernels& kernels, const PagedCache& cache, const PassPlan& plan, size_t layer_index, Matrix qkv,
             Matrix out) { kernels.Attend(cache.Attend(plan, layer_index, qkv, out), plan); },
          nb::arg("cache"), nb::arg("plan"), nb::arg("layer_index"), nb::arg("qkv"), nb::arg("out"),
          "Causal attention of the pass's queries over the pages of their sequences.");
}
