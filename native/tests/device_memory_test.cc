// What can be known of GPU memory without a GPU: who refuses it, and that nobody reads or writes at its address.

#include <cerrno>
#include <memory>
#include <string>
#include <vector>

#include "fabric/engine.h"
#include "tests/check.h"

namespace pdserve::fabric {
namespace {

constexpr uint64_t kNumBytes = 1 << 16;

// Nothing is mapped there: a core that touched it would end the test.
Memory OnDevice() { return {reinterpret_cast<char*>(uintptr_t{4096}), kNumBytes, 0}; }

std::unique_ptr<DomainGroup> OpenShmGroup() {
  const Provider* provider;
  CHECK(FindProvider("shm", &provider).ok());
  std::unique_ptr<DomainGroup> group;
  // shm is the one provider that opens so on any machine; Engine lets nobody use it so.
  const DomainGroup::Options options = {.bind_hosts = {""}, .max_slice_bytes = kNumBytes / 2, .device_memory = true};
  CHECK(DomainGroup::Open(*provider, options, &group).ok());
  return group;
}

void ProvidersThatCanNotReachItAreRefusedWithWhatToUse() {
  for (const std::string provider : {"tcp", "shm"}) {
    std::unique_ptr<Engine> engine;
    const Status status =
        Engine::Open({.provider = provider, .groups = {{{"127.0.0.1"}, {}}}, .device_memory = true}, &engine);
    CHECK(!status.ok() && !engine);
    CHECK(status.message().find(provider + " can't write from or to GPU memory here; use verbs or efa") !=
          std::string::npos);
  }
}

void EngineOpenedWithoutDeviceMemoryRefusesToRegisterIt() {
  std::unique_ptr<Engine> engine;
  CHECK(Engine::Open({.provider = "tcp", .groups = {{{"127.0.0.1"}, {}}}}, &engine).ok());
  uint32_t region_id;
  CHECK(engine->Register(OnDevice(), 0, &region_id).code() == Status::Code::kInvalid);
  std::vector<char> host(kNumBytes);
  CHECK(engine->Register({host.data(), kNumBytes}, 0, &region_id).ok());
}

void HostMemoryIsRegisteredBesideDeviceMemory() {
  std::vector<char> host(kNumBytes);
  const std::unique_ptr<DomainGroup> group = OpenShmGroup();
  std::shared_ptr<const LocalRegion> source;
  CHECK(group->RegisterSource({host.data(), kNumBytes}, &source).ok());
  RegionDescriptor exposure;
  CHECK(group->Expose(source->memory(), &exposure).ok());
  CHECK(exposure.num_bytes == kNumBytes && exposure.slices.size() == 2);
  group->CloseExposure(exposure);
}

// A libfabric without CUDA refuses; one with it registers. Neither may look.
void DeviceMemoryIsRegisteredAsSuchOrRefused() {
  const std::unique_ptr<DomainGroup> group = OpenShmGroup();
  std::shared_ptr<const LocalRegion> source;
  const Status registered = group->RegisterSource(OnDevice(), &source);
  CHECK(registered.ok() == (source != nullptr));
  if (registered.ok()) {
    CHECK(source->SliceAt(0).descriptors[0] != nullptr);
    return;
  }
  CHECK(registered.error() == ENOSYS && registered.message().find("libfabric built with CUDA") != std::string::npos);
  RegionDescriptor exposure;
  CHECK(group->Expose(OnDevice(), &exposure).error() == ENOSYS);
}

}  // namespace
}  // namespace pdserve::fabric

int main() {
  using namespace pdserve::fabric;
  RUN(ProvidersThatCanNotReachItAreRefusedWithWhatToUse);
  RUN(EngineOpenedWithoutDeviceMemoryRefusesToRegisterIt);
  RUN(HostMemoryIsRegisteredBesideDeviceMemory);
  RUN(DeviceMemoryIsRegisteredAsSuchOrRefused);
}
