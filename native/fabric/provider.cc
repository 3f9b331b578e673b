#include "fabric/provider.h"

#include <array>

namespace pdserve::fabric {
namespace {

constexpr std::array<Provider, 4> kProviders = {{
    {.name = "tcp",
     .libfabric_name = "tcp;ofi_rxm",
     .has_wait_fd = true,
     .bind_host = BindHost::kAddress,
     .endpoint_per_peer = true,
     .advice = "check that the bind host is an address of this machine and that `fi_info -p 'tcp;ofi_rxm'` lists it "
               "(Debian and Ubuntu: apt-get install libfabric1 libfabric-bin)"},
    {.name = "shm",
     .libfabric_name = "shm",
     .has_wait_fd = false,
     .bind_host = BindHost::kIgnored,
     .endpoint_per_peer = true,
     .advice = "check that /dev/shm is writable and that `fi_info -p shm` lists it "
               "(Debian and Ubuntu: apt-get install libfabric1 libfabric-bin)"},
    {.name = "efa",
     .libfabric_name = "efa",
     .has_wait_fd = false,
     .bind_host = BindHost::kName,
     .endpoint_per_peer = false,
     .advice = "install the EFA driver and AWS's libfabric, and check that `fi_info -p efa` lists the NIC"},
    {.name = "verbs",
     .libfabric_name = "verbs;ofi_rxm",
     .has_wait_fd = true,
     .bind_host = BindHost::kAddress,
     .endpoint_per_peer = true,
     .advice =
         "install rdma-core and a libfabric built with verbs, and check that `fi_info -p 'verbs;ofi_rxm'` lists it"},
}};

}  // namespace

Status FindProvider(std::string_view name, const Provider** provider) {
  std::string known;
  for (const Provider& candidate : kProviders) {
    if (candidate.name == name) {
      *provider = &candidate;
      return Status::Ok();
    }
    known += known.empty() ? "" : ", ";
    known += candidate.name;
  }
  return Status::Invalid("open", "no provider is called '" + std::string(name) + "'; there are " + known);
}

std::string DeviceMemoryAdvice(const Provider& provider) {
  return std::string(provider.name) +
         " can't write from or to GPU memory here; use verbs or efa, on NICs with GPUDirect RDMA (nvidia-peermem or "
         "dma-buf) and with a libfabric built with CUDA";
}

}  // namespace pdserve::fabric
