// The module pdserve._fabric: the only file of the fabric that sees Python.
//
// Calls that may wait for the worker thread release the interpreter lock. Errors become pdserve.errors.FabricError and
// CapacityError.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <tuple>

#include "fabric/engine.h"
#include "layer_counter/layer_counter.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace pdserve::fabric {
namespace {

using PageArray = nb::ndarray<const uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
// (start, num_bytes, base, keys by NIC) of each slice.
using SliceTuples = std::vector<std::tuple<uint64_t, uint64_t, uint64_t, std::vector<uint64_t>>>;
// (bind hosts, cores) of each domain group.
using GroupTuples = std::vector<std::tuple<std::vector<std::string>, std::vector<uint32_t>>>;

// How long a caller that was refused for want of room should wait: the worker thread needs milliseconds.
constexpr double kRetryAfterS = 0.05;

[[noreturn]] void Raise(const Status& status) {
  const nb::module_ errors = nb::module_::import_("pdserve.errors");
  const nb::object type = errors.attr(status.code() == Status::Code::kCapacity ? "CapacityError" : "FabricError");
  const nb::object error = status.code() == Status::Code::kCapacity
                               ? type(status.message(), "retry_after_s"_a = kRetryAfterS)
                               : type(status.message(), "operation"_a = status.call(), "errno"_a = status.error());
  PyErr_SetObject(type.ptr(), error.ptr());
  throw nb::python_error();
}

void Check(const Status& status) {
  if (!status.ok()) Raise(status);
}

char* Pointer(uintptr_t address) { return reinterpret_cast<char*>(address); }

std::vector<uint32_t> ToVector(const PageArray& pages) { return {pages.data(), pages.data() + pages.size()}; }

RegionDescriptor ToDescriptor(uint64_t num_bytes, const std::vector<uint32_t>& nics, const SliceTuples& slices) {
  RegionDescriptor descriptor{.num_bytes = num_bytes, .nics = nics, .slices = {}};
  for (const auto& [start, slice_bytes, base, keys] : slices) {
    descriptor.slices.push_back({start, slice_bytes, base, keys});
  }
  return descriptor;
}

SliceTuples ToTuples(const RegionDescriptor& descriptor) {
  SliceTuples slices;
  for (const RemoteSlice& slice : descriptor.slices) {
    slices.emplace_back(slice.start, slice.num_bytes, slice.base, slice.keys);
  }
  return slices;
}

// The work of a call that may wait, without the interpreter lock.
template <typename Work>
void CheckUnlocked(Work work) {
  Status status = Status::Ok();
  {
    const nb::gil_scoped_release unlocked;
    status = work();
  }
  Check(status);
}

std::unique_ptr<Engine> OpenEngine(const std::string& provider, const GroupTuples& groups, uint64_t max_slice_bytes,
                                   bool device_memory) {
  Engine::Options options{
      .provider = provider, .groups = {}, .max_slice_bytes = max_slice_bytes, .device_memory = device_memory};
  for (const auto& [bind_hosts, cpus] : groups) options.groups.push_back({bind_hosts, cpus});
  std::unique_ptr<Engine> engine;
  CheckUnlocked([&] { return Engine::Open(options, &engine); });
  return engine;
}

void Arm(Engine& engine, Engine::PushRequest request) {
  if (engine.WaitsToArm(request)) {
    CheckUnlocked([&] { return engine.Arm(std::move(request)); });
  } else {
    Check(engine.Arm(std::move(request)));  // To let the lock go and wait for it would cost more than the call.
  }
}

void ArmPages(Engine& engine, uint64_t push_id, uint32_t peer_id, uint32_t source, uint32_t target, uint32_t immediate,
              const PageArray& source_pages, const PageArray& target_pages, uint32_t num_layers, uint64_t run_bytes,
              uint64_t source_page_bytes, uint64_t target_page_bytes, uint64_t source_layer_bytes,
              uint64_t target_layer_bytes, uint64_t source_offset, uint64_t target_offset, uint64_t first_tick) {
  Arm(engine, {.push_id = push_id,
               .peer_id = peer_id,
               .source = source,
               .target = target,
               .immediate = immediate,
               .source_pages = {ToVector(source_pages), source_offset, source_page_bytes, source_layer_bytes},
               .target_pages = {ToVector(target_pages), target_offset, target_page_bytes, target_layer_bytes},
               .num_layers = num_layers,
               .run_bytes = run_bytes,
               .first_due_tick = first_tick + 1});
}

void ArmSingle(Engine& engine, uint64_t push_id, uint32_t peer_id, uint32_t source, uint32_t target, uint32_t immediate,
               uint64_t source_offset, uint64_t target_offset, uint64_t num_bytes, uint64_t tick) {
  Arm(engine, {.push_id = push_id,
               .peer_id = peer_id,
               .source = source,
               .target = target,
               .immediate = immediate,
               .source_pages = {{0}, source_offset, 0, 0},
               .target_pages = {{0}, target_offset, 0, 0},
               .num_layers = 1,
               .run_bytes = num_bytes,
               .first_due_tick = tick,
               .first_pair = FirstPairOfSingleWrite(push_id)});
}

void BindEvents(nb::module_& module) {
  nb::enum_<PushOutcome>(module, "PushOutcome")
      .value("DONE", PushOutcome::kDone)
      .value("CANCELLED", PushOutcome::kCancelled)
      .value("FAILED", PushOutcome::kFailed);
  nb::class_<LayerTimes>(module, "LayerTimes")
      .def_ro("computed_ns", &LayerTimes::computed_ns)
      .def_ro("posted_ns", &LayerTimes::posted_ns)
      .def_ro("completed_ns", &LayerTimes::completed_ns);
  nb::class_<PushEnded>(module, "PushEnded")
      .def_ro("push_id", &PushEnded::push_id)
      .def_ro("outcome", &PushEnded::outcome)
      .def_ro("error", &PushEnded::error)
      .def_ro("layers", &PushEnded::layers);
  nb::class_<FlushEnded>(module, "FlushEnded")
      .def_ro("flush_id", &FlushEnded::flush_id)
      .def_ro("delivered", &FlushEnded::delivered)
      .def_ro("error", &FlushEnded::error);
  nb::class_<Landed>(module, "Landed")
      .def_ro("immediate", &Landed::immediate)
      .def_ro("num_writes", &Landed::num_writes)
      .def_ro("first_ns", &Landed::first_ns)
      .def_ro("last_ns", &Landed::last_ns)
      .def_ro("arrivals_ns", &Landed::arrivals_ns);
  nb::class_<ExpectationExpired>(module, "ExpectationExpired")
      .def_ro("immediate", &ExpectationExpired::immediate)
      .def_ro("num_arrived", &ExpectationExpired::num_arrived)
      .def_ro("num_expected", &ExpectationExpired::num_expected);
  nb::class_<Fenced>(module, "Fenced")
      .def_prop_ro("num_bytes", [](const Fenced& fenced) { return fenced.exposure.num_bytes; })
      .def_prop_ro("nics", [](const Fenced& fenced) { return fenced.exposure.nics; })
      .def_prop_ro("slices", [](const Fenced& fenced) { return ToTuples(fenced.exposure); });
}

template <auto Member>
uint64_t ReadCounter(const Engine& engine) {
  return engine.Total(Member);
}

void BindCounters(nb::class_<Engine>& engine) {
  engine.def_prop_ro("bytes_posted_by_nic", &Engine::BytesPostedByNic)
      .def_prop_ro("num_writes_posted", &ReadCounter<&FabricCounters::num_writes_posted>)
      .def_prop_ro("num_writes_completed", &ReadCounter<&FabricCounters::num_writes_completed>)
      .def_prop_ro("num_writes_failed", &ReadCounter<&FabricCounters::num_writes_failed>)
      .def_prop_ro("num_in_flight", &ReadCounter<&FabricCounters::num_in_flight>)
      .def_prop_ro("num_immediates_received", &ReadCounter<&FabricCounters::num_immediates_received>)
      .def_prop_ro("num_stale_immediates", &ReadCounter<&FabricCounters::num_stale_immediates>)
      .def_prop_ro("num_armed_pushes", &ReadCounter<&FabricCounters::num_armed_pushes>);
}

void BindRegionsAndPeers(nb::class_<Engine>& engine) {
  engine
      .def(
          "watch",
          [](Engine& self, uintptr_t address, uint64_t num_bytes) {
            CheckUnlocked([&] { return self.Watch(Pointer(address), num_bytes); });
          },
          "address"_a, "num_bytes"_a)
      .def(
          "register",
          [](Engine& self, uintptr_t address, uint64_t num_bytes, std::optional<int> cuda_device, size_t group_index) {
            uint32_t region_id = 0;
            const Memory memory = {Pointer(address), num_bytes, cuda_device};
            CheckUnlocked([&] { return self.Register(memory, group_index, &region_id); });
            return region_id;
          },
          "address"_a, "num_bytes"_a, nb::kw_only(), "cuda_device"_a.none(), "group_index"_a)
      .def(
          "expose",
          [](Engine& self, uint32_t region_id) {
            RegionDescriptor descriptor;
            CheckUnlocked([&] { return self.Expose(region_id, &descriptor); });
            return std::make_tuple(descriptor.nics, ToTuples(descriptor));
          },
          "region_id"_a, "The NICs, and the slices: (start, num_bytes, base, keys by NIC) of each.")
      .def(
          "fence",
          [](Engine& self, uint64_t num_bytes, const std::vector<uint32_t>& nics, const SliceTuples& slices) {
            Check(self.Fence(ToDescriptor(num_bytes, nics, slices)));
          },
          "num_bytes"_a, "nics"_a, "slices"_a)
      .def(
          "connect",
          [](Engine& self, nb::bytes address) {
            uint32_t peer_id = 0;
            const std::span<const uint8_t> bytes(static_cast<const uint8_t*>(address.data()), address.size());
            CheckUnlocked([&] { return self.Connect(bytes, &peer_id); });
            return peer_id;
          },
          "address"_a)
      .def(
          "disconnect", [](Engine& self, uint32_t peer_id) { Check(self.Disconnect(peer_id)); }, "peer_id"_a)
      .def(
          "attach",
          [](Engine& self, uint32_t peer_id, uint64_t num_bytes, const std::vector<uint32_t>& nics,
             const SliceTuples& slices) {
            uint32_t remote_region_id = 0;
            Check(self.Attach(peer_id, ToDescriptor(num_bytes, nics, slices), &remote_region_id));
            return remote_region_id;
          },
          "peer_id"_a, "num_bytes"_a, "nics"_a, "slices"_a);
}

void BindWrites(nb::class_<Engine>& engine) {
  engine
      .def("arm_pages", &ArmPages, nb::kw_only(), "push_id"_a, "peer_id"_a, "source"_a, "target"_a, "immediate"_a,
           "source_pages"_a, "target_pages"_a, "num_layers"_a, "run_bytes"_a, "source_page_bytes"_a,
           "target_page_bytes"_a, "source_layer_bytes"_a, "target_layer_bytes"_a, "source_offset"_a, "target_offset"_a,
           "first_tick"_a)
      .def("arm_single", &ArmSingle, nb::kw_only(), "push_id"_a, "peer_id"_a, "source"_a, "target"_a, "immediate"_a,
           "source_offset"_a, "target_offset"_a, "num_bytes"_a, "tick"_a)
      .def(
          "cancel", [](Engine& self, uint64_t push_id) { Check(self.Cancel(push_id)); }, "push_id"_a)
      .def(
          "flush",
          [](Engine& self, uint64_t flush_id, uint32_t peer_id, const std::vector<uint32_t>& targets,
             int64_t deadline_ns) { Check(self.Flush(flush_id, peer_id, targets, deadline_ns)); },
          "flush_id"_a, "peer_id"_a, "targets"_a, nb::kw_only(), "deadline_ns"_a)
      .def(
          "expect",
          [](Engine& self, uint32_t immediate, uint32_t num_writes, int64_t deadline_ns, bool record_arrivals) {
            Check(self.Expect({immediate, num_writes, deadline_ns, record_arrivals}));
          },
          "immediate"_a, "num_writes"_a, nb::kw_only(), "deadline_ns"_a, "record_arrivals"_a)
      .def("forget", &Engine::Forget, "immediate"_a)
      .def("poll", &Engine::Poll, "The events since the last call.");
}

}  // namespace
}  // namespace pdserve::fabric

NB_MODULE(_fabric, module) {
  using namespace pdserve;
  using namespace pdserve::fabric;
  module.doc() = "libfabric for pdserve.fabric.native, which is the only caller.";
  BindEvents(module);
  module.attr("MAX_SLICE_BYTES") = kMaxSliceBytes;
  module.def(
      "libfabric_version", [] { return std::make_tuple(FI_MAJOR(fi_version()), FI_MINOR(fi_version())); },
      "Of the library that was loaded: (major, minor).");

  nb::class_<Engine> engine(module, "Engine");
  engine.def(nb::new_(&OpenEngine), "provider"_a, nb::kw_only(), "groups"_a, "max_slice_bytes"_a, "device_memory"_a)
      .def_prop_ro("address",
                   [](const Engine& self) { return nb::bytes(self.address().data(), self.address().size()); })
      .def("fileno", &Engine::event_fd)
      .def("close", &Engine::Close, nb::call_guard<nb::gil_scoped_release>(),
           "False when a worker thread hangs in the provider and was left behind.");
  BindRegionsAndPeers(engine);
  BindWrites(engine);
  BindCounters(engine);

  nb::class_<LayerCounter>(module, "LayerCounter", "A rank's side of a layer counter, for tests and benchmarks.")
      .def_static(
          "at", [](uintptr_t address) { return reinterpret_cast<LayerCounter*>(address); }, nb::rv_policy::reference,
          "address"_a, "The counter in a mapped region, which must outlive it.")
      .def_prop_ro("ticks", [](const LayerCounter& self) { return self.ticks.load(); })
      .def("tick", &LayerCounter::Tick);
}
