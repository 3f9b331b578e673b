// The NICs of one domain group: a libfabric domain each, whose registrations, routes and completions go together.
//
// Thread safety: none; one thread calls everything, the destructor included (see domain.h).
//
// Invariants:
//   1. A source, and an exposure, is registered with all NICs of the group, or with none.
//   2. All NICs of a group address a region alike (RemoteSlice::base), whatever their keys.

#ifndef PDSERVE_FABRIC_DOMAIN_GROUP_H_
#define PDSERVE_FABRIC_DOMAIN_GROUP_H_

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "fabric/domain.h"
#include "fabric/nic_addresses.h"
#include "fabric/region.h"

namespace pdserve::fabric {

class DomainGroup final : public WritePort {
 public:
  struct Options {
    std::vector<std::string> bind_hosts;  // One a NIC.
    uint32_t first_nic = 0;               // The place of the group's first NIC among all of the fabric.
    uint64_t max_slice_bytes = kMaxSliceBytes;
    bool device_memory = false;  // GPU memory may be registered.
  };

  // REQUIRES: at least one bind host.
  static Status Open(const Provider& provider, const Options& options, std::unique_ptr<DomainGroup>* group);

  std::vector<NicAddress> addresses() const;
  bool reorders_writes() const;
  // Invalid unless each could be the address of a peer's NIC.
  Status CheckAddresses(std::span<const NicAddress> addresses) const;

  // The registrations of sources last as long as the group.
  Status RegisterSource(const Memory& memory, std::shared_ptr<const LocalRegion>* region);
  Status Expose(const Memory& memory, RegionDescriptor* descriptor);
  // Closes the registrations. REQUIRES: `exposure` came from Expose and was not closed.
  void CloseExposure(const RegionDescriptor& exposure);

  Status OpenRoute(uint32_t local_nic, std::span<const uint8_t> address, PeerRoute* route) override;
  void CloseRoute(const PeerRoute& route) override;
  int Write(const WriteRequest& request) override;

  // Makes progress, beginning with another NIC each time, so that a busy one does not fill all the room for ever.
  // Returns how many completions were put at the front of `completions`.
  size_t ReadCompletions(std::span<Completion> completions);

  // The descriptors to poll once PrepareToWait() returned true; empty where the provider has none.
  std::vector<int> wait_fds() const;
  bool PrepareToWait();

 private:
  explicit DomainGroup(const Options& options) : options_(options) {}
  Status RegisterSlice(const Memory& memory, const SliceRange& range, uint64_t access,
                       std::vector<Registration>* registrations);

  const Options options_;
  // In the order of opening: registrations are closed before their domains.
  std::vector<std::unique_ptr<Domain>> domains_;  // By NIC.
  std::vector<Registration> source_registrations_;
  std::map<uint64_t, std::vector<Registration>> exposures_;  // By the first NIC's key of the first slice.
  size_t first_to_read_ = 0;
};

}  // namespace pdserve::fabric

#endif  // PDSERVE_FABRIC_DOMAIN_GROUP_H_
