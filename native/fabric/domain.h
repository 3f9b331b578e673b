// The libfabric objects of one NIC: fabric, domain, address vector, completion queue, endpoints.
//
// Thread safety: none. One thread calls everything, the destructor included (FI_THREAD_DOMAIN, manual progress):
// removing an address while another thread writes is a race inside several providers.
// Lifetime: registrations are closed before the domain.
//
// Invariants:
//   1. No exception passes through a libfabric call, and no error completion ends the process.
//   2. What `info` came back with decides about addresses, keys and local descriptors (mr_mode), and never the name of
//      the provider.
//   3. No core touches GPU memory: its address goes to libfabric alone, with a registration that says whose it is.
//      Writes are never injected. GPU memory is untested on hardware.

#ifndef PDSERVE_FABRIC_DOMAIN_H_
#define PDSERVE_FABRIC_DOMAIN_H_

#include <rdma/fabric.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>

#include <cstdint>
#include <list>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "fabric/completion.h"
#include "fabric/provider.h"
#include "fabric/region.h"
#include "fabric/status.h"
#include "fabric/write_port.h"

namespace pdserve::fabric {

template <typename Object>
struct FidCloser {
  void operator()(Object* object) const { fi_close(&object->fid); }
};
template <typename Object>
using Fid = std::unique_ptr<Object, FidCloser<Object>>;

struct Registration {
  Fid<fid_mr> mr;
  uint64_t base;
  uint64_t key;
};

// The first of `infos` whose domain is called `name`, or so with an ending after a hyphen; null when there is none.
const fi_info* FindDomain(const fi_info* infos, std::string_view name);

class Domain {
 public:
  // `device_memory`: GPU memory may be registered; refused where the provider can't reach it.
  static Status Open(const Provider& provider, const std::string& bind_host, bool device_memory,
                     std::unique_ptr<Domain>* domain);

  // What a peer passes to InsertPeer; it does not change.
  const std::vector<uint8_t>& address() const { return address_; }
  // Writes to one peer may overtake each other, so only a delivery-complete write says anything of those before it.
  bool reorders_writes() const { return reorders_writes_; }
  // A source that lies there has to be registered, and its descriptor passed with each write.
  bool NeedsDescriptor(const Memory& source) const;

  // `access` is FI_WRITE for a source, FI_REMOTE_WRITE for a target.
  // REQUIRES: opened with `device_memory` when it is a GPU's.
  Status Register(const Memory& memory, uint64_t access, Registration* registration);

  // Invalid unless a peer's NIC could have the address.
  Status CheckAddress(std::span<const uint8_t> address) const;
  // Sets all of `route` but its local_nic.
  Status InsertPeer(std::span<const uint8_t> address, PeerRoute* route);
  // What is still in flight on the route may never complete.
  void RemovePeer(const PeerRoute& route);

  // As WritePort::Write.
  int Write(const WriteRequest& request);

  // Makes progress. Returns how many completions were put at the front of `completions`.
  size_t ReadCompletions(std::span<Completion> completions);

  // The descriptors to poll once PrepareToWait() returned true; none where the provider has none.
  void AppendWaitFds(std::vector<int>* fds) const;
  bool PrepareToWait();

 private:
  explicit Domain(const Provider& provider) : provider_(provider) {}
  Status GetInfo(const std::string& bind_host, bool device_memory);
  // Sets reorders_writes_ and, when it returns 0, info_; else a negative libfabric error.
  int FindInfo(fi_info* hints, const std::string& bind_host);
  // What closes together: rxm 1.17 keeps waiting for a closed endpoint's part of a completion queue it shared. In the
  // order of opening, and never assigned to: that would close the address vector before the endpoint that uses it,
  // which libfabric refuses, and later crashes on.
  struct Endpoint {
    Fid<fid_av> address_vector;
    Fid<fid_cq> completion_queue;
    Fid<fid_ep> endpoint;
    int wait_fd = -1;  // Where the provider has one.
  };

  Status OpenObjects();
  Status OpenEndpoint(Endpoint* opened);
  Status OpenCompletionQueue(Endpoint* opened);
  Status ReadAddress();
  size_t ReadQueue(fid_cq* queue, std::span<Completion> completions);

  struct InfoFreer {
    void operator()(fi_info* info) const { fi_freeinfo(info); }
  };

  const Provider& provider_;
  // In the order of opening, so that destruction closes endpoints first.
  std::unique_ptr<fi_info, InfoFreer> info_;
  Fid<fid_fabric> fabric_;
  Fid<fid_domain> domain_;
  // The first receives, and writes where the provider has no endpoint for each peer; the others write to one peer each.
  std::list<Endpoint> endpoints_;
  std::vector<uint8_t> address_;
  bool reorders_writes_ = false;
};

}  // namespace pdserve::fabric

#endif  // PDSERVE_FABRIC_DOMAIN_H_
