#include "fabric/domain_group.h"

#include <algorithm>
#include <cerrno>
#include <iterator>
#include <utility>

namespace pdserve::fabric {

Status DomainGroup::Open(const Provider& provider, const Options& options, std::unique_ptr<DomainGroup>* group) {
  std::unique_ptr<DomainGroup> opened(new DomainGroup(options));
  for (const std::string& bind_host : options.bind_hosts) {
    Status status = Domain::Open(provider, bind_host, options.device_memory, &opened->domains_.emplace_back());
    if (!status.ok()) {
      opened->domains_.pop_back();
      return status;
    }
    if (const size_t num_bytes = opened->domains_.back()->address().size(); num_bytes > kMaxNicAddressBytes) {
      return Status::Failed("fi_getname", ENAMETOOLONG);
    }
  }
  *group = std::move(opened);
  return Status::Ok();
}

std::vector<NicAddress> DomainGroup::addresses() const {
  std::vector<NicAddress> addresses;
  for (const auto& domain : domains_) addresses.push_back(domain->address());
  return addresses;
}

bool DomainGroup::reorders_writes() const {
  return std::any_of(domains_.begin(), domains_.end(), [](const auto& domain) { return domain->reorders_writes(); });
}

Status DomainGroup::CheckAddresses(std::span<const NicAddress> addresses) const {
  for (const NicAddress& address : addresses) {
    if (Status status = domains_.front()->CheckAddress(address); !status.ok()) return status;
  }
  return Status::Ok();
}

Status DomainGroup::RegisterSlice(const Memory& memory, const SliceRange& range, uint64_t access,
                                  std::vector<Registration>* registrations) {
  const Memory slice = {memory.address + range.start, range.num_bytes, memory.cuda_device};
  for (const auto& domain : domains_) {
    Registration registration;
    Status status = domain->Register(slice, access, &registration);
    if (!status.ok()) return status;
    registrations->push_back(std::move(registration));
  }
  return Status::Ok();
}

Status DomainGroup::RegisterSource(const Memory& memory, std::shared_ptr<const LocalRegion>* region) {
  std::vector<LocalRegion::Slice> slices;
  std::vector<Registration> registrations;
  for (const SliceRange& range : CutIntoSlices(memory.num_bytes, options_.max_slice_bytes)) {
    LocalRegion::Slice& slice = slices.emplace_back(range, std::vector<void*>(domains_.size(), nullptr));
    if (!domains_.front()->NeedsDescriptor(memory)) continue;
    if (Status status = RegisterSlice(memory, range, FI_WRITE, &registrations); !status.ok()) return status;
    std::transform(registrations.end() - static_cast<ptrdiff_t>(domains_.size()), registrations.end(),
                   slice.descriptors.begin(), [](const Registration& made) { return fi_mr_desc(made.mr.get()); });
  }
  std::move(registrations.begin(), registrations.end(), std::back_inserter(source_registrations_));
  *region = std::make_shared<const LocalRegion>(memory, std::move(slices));
  return Status::Ok();
}

Status DomainGroup::Expose(const Memory& memory, RegionDescriptor* descriptor) {
  RegionDescriptor exposed{.num_bytes = memory.num_bytes, .nics = {}, .slices = {}};
  for (uint32_t nic = 0; nic < domains_.size(); ++nic) exposed.nics.push_back(options_.first_nic + nic);
  std::vector<Registration> registrations;
  for (const SliceRange& range : CutIntoSlices(memory.num_bytes, options_.max_slice_bytes)) {
    const size_t first = registrations.size();
    if (Status status = RegisterSlice(memory, range, FI_REMOTE_WRITE, &registrations); !status.ok()) return status;
    RemoteSlice slice = {range.start, range.num_bytes, registrations[first].base, {}};
    for (size_t i = first; i < registrations.size(); ++i) {
      if (registrations[i].base != slice.base) {
        return Status::Failed("fi_mr_regattr", EINVAL,
                              "the NICs of a domain group must be of one kind (mr_mode differs)");
      }
      slice.keys.push_back(registrations[i].key);
    }
    exposed.slices.push_back(std::move(slice));
  }
  exposures_.emplace(exposed.slices.front().keys.front(), std::move(registrations));
  *descriptor = std::move(exposed);
  return Status::Ok();
}

void DomainGroup::CloseExposure(const RegionDescriptor& exposure) {
  exposures_.erase(exposure.slices.front().keys.front());
}

Status DomainGroup::OpenRoute(uint32_t local_nic, std::span<const uint8_t> address, PeerRoute* route) {
  route->local_nic = local_nic;
  return domains_[local_nic]->InsertPeer(address, route);
}

void DomainGroup::CloseRoute(const PeerRoute& route) { domains_[route.local_nic]->RemovePeer(route); }

int DomainGroup::Write(const WriteRequest& request) { return domains_[request.route.local_nic]->Write(request); }

size_t DomainGroup::ReadCompletions(std::span<Completion> completions) {
  first_to_read_ = (first_to_read_ + 1) % domains_.size();
  size_t num_read = 0;
  for (size_t i = 0; i < domains_.size(); ++i) {
    Domain& domain = *domains_[(first_to_read_ + i) % domains_.size()];
    num_read += domain.ReadCompletions(completions.subspan(num_read));
  }
  return num_read;
}

std::vector<int> DomainGroup::wait_fds() const {
  std::vector<int> fds;
  for (const auto& domain : domains_) domain->AppendWaitFds(&fds);
  return fds;
}

bool DomainGroup::PrepareToWait() {
  return std::all_of(domains_.begin(), domains_.end(), [](const auto& domain) { return domain->PrepareToWait(); });
}

}  // namespace pdserve::fabric
