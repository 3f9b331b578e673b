// The only file of the kernels that sees Python.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include "layer_counter/layer_counter.h"

namespace nb = nanobind;

namespace pdserve {
namespace {

using Bytes = nb::ndarray<uint8_t, nb::numpy, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// Keeps the region mapped for as long as it can tick.
class CounterTicker {
 public:
  explicit CounterTicker(Bytes region) : region_(region) {
    if (region.size() < sizeof(LayerCounter)) throw nb::value_error("the region is too small for a layer counter");
  }

  void Tick() { counter()->Tick(); }
  uint64_t ticks() const { return counter()->ticks.load(std::memory_order_acquire); }

 private:
  LayerCounter* counter() const { return reinterpret_cast<LayerCounter*>(region_.data()); }

  Bytes region_;
};

}  // namespace
}  // namespace pdserve

NB_MODULE(_kernels, m) {
  using namespace pdserve;
  m.doc() = "CPU kernels of the engine, and the tick of the layer counter.";

  nb::class_<CounterTicker>(m, "CounterTicker", "The ticking end of a layer counter region.")
      .def(nb::init<Bytes>(), nb::arg("region"))
      .def("tick", &CounterTicker::Tick, "Count one layer, or the end of a pass, and wake who waits.")
      .def_prop_ro("ticks", &CounterTicker::ticks);
}
