#include "fabric/engine.h"

#include <utility>

namespace pdserve::fabric {

Status Engine::Open(const Options& options, std::unique_ptr<Engine>* engine) {
  const Provider* provider = nullptr;
  if (Status status = FindProvider(options.provider, &provider); !status.ok()) return status;
  if (Status status = Validate(options, *provider); !status.ok()) return status;
  std::vector<size_t> num_nics_by_group;
  for (const GroupOptions& group : options.groups) num_nics_by_group.push_back(group.bind_hosts.size());
  std::unique_ptr<Engine> opened(new Engine(num_nics_by_group, options.device_memory));
  if (Status status = opened->StartWorkers(options, *provider); !status.ok()) return status;
  *engine = std::move(opened);
  return Status::Ok();
}

Status Engine::Validate(const Options& options, const Provider& provider) {
  if (options.max_slice_bytes == 0) return Status::Invalid("open", "a slice has at least one byte");
  if (options.device_memory && provider.bind_host == BindHost::kIgnored) {
    // What libfabric offers for shm is CUDA's legacy IPC, which does not know memory made with cuMemCreate.
    return Status::Invalid("open", DeviceMemoryAdvice(provider));
  }
  size_t num_nics = 0;
  for (const GroupOptions& group : options.groups) {
    if (group.bind_hosts.empty()) return Status::Invalid("open", "a domain group has at least one NIC");
    if (group.bind_hosts.size() > 1 && provider.bind_host == BindHost::kIgnored) {
      return Status::Invalid("open", std::string(provider.name) +
                                         " has one NIC a domain group: it copies through memory, with the cores of the "
                                         "group's thread");
    }
    num_nics += group.bind_hosts.size();
  }
  if (num_nics >= 1 && num_nics <= kMaxNics) return Status::Ok();
  return Status::Invalid("open",
                         "a fabric has 1 to " + std::to_string(kMaxNics) + " NICs, not " + std::to_string(num_nics));
}

Status Engine::StartWorkers(const Options& options, const Provider& provider) {
  std::vector<NicAddress> addresses;
  for (size_t i = 0; i < options.groups.size(); ++i) {
    const GroupOptions& group = options.groups[i];
    Status status = worker(i)->Start({.provider = &provider,
                                      .group = {.bind_hosts = group.bind_hosts,
                                                .first_nic = static_cast<uint32_t>(addresses.size()),
                                                .max_slice_bytes = options.max_slice_bytes,
                                                .device_memory = options.device_memory},
                                      .cpus = group.cpus});
    if (!status.ok()) return status;
    auto own = std::make_shared<std::vector<NicAddress>>();
    status = worker(i)->Call([worker = worker(i), own] {
      *own = worker->group().addresses();
      return Status::Ok();
    });
    if (!status.ok()) return status;
    addresses.insert(addresses.end(), own->begin(), own->end());
  }
  address_ = EncodeNicAddresses(addresses);
  return Status::Ok();
}

bool Engine::Close() {
  const bool stopped = plane_->Stop();
  plane_->events.Drain();
  return stopped;
}

Status Engine::Watch(char* address, uint64_t num_bytes) {
  if (plane_->groups.front()->watcher) return Status::Invalid("watch", "this fabric watches a layer counter already");
  if (num_bytes < sizeof(LayerCounter) || reinterpret_cast<uintptr_t>(address) % alignof(LayerCounter) != 0) {
    return Status::Invalid("watch", "a layer counter has " + std::to_string(sizeof(LayerCounter)) + " bytes, not " +
                                        std::to_string(num_bytes));
  }
  for (const auto& group : plane_->groups) {
    auto watcher = std::make_shared<std::shared_ptr<LayerWatcher>>();
    Status status = group->worker.Call([worker = &group->worker, address, watcher] {
      *watcher = worker->Watch(reinterpret_cast<LayerCounter*>(address));
      return Status::Ok();
    });
    if (!status.ok()) return status;
    group->watcher = std::move(*watcher);
  }
  return Status::Ok();
}

Status Engine::Register(const Memory& memory, size_t group_index, uint32_t* region_id) {
  if (memory.cuda_device && !device_memory_) {
    return Status::Invalid("register", "this fabric was opened without device memory, and can't reach a GPU's");
  }
  if (memory.num_bytes == 0) return Status::Invalid("register", "a region has at least one byte");
  if (group_index >= plane_->groups.size()) {
    return Status::Invalid("register", "no domain group " + std::to_string(group_index) + ", there are " +
                                           std::to_string(plane_->groups.size()));
  }
  auto region = std::make_shared<std::shared_ptr<const LocalRegion>>();
  Status status = worker(group_index)->Call([worker = worker(group_index), memory, region] {
    return worker->group().RegisterSource(memory, region.get());
  });
  if (!status.ok()) return status;
  *region_id = next_id_++;
  regions_.emplace(*region_id, Region{group_index, std::move(*region)});
  return status;
}

Status Engine::Expose(uint32_t region_id, RegionDescriptor* descriptor) {
  const auto found = regions_.find(region_id);
  if (found == regions_.end()) return Status::Invalid("expose", "no region " + std::to_string(region_id));
  if (exposures_.size() >= kMaxExposures) return Status::Capacity("expose", "too many regions are exposed");
  const size_t group_index = found->second.group_index;
  auto exposed = std::make_shared<RegionDescriptor>();
  Status status = worker(group_index)->Call([worker = worker(group_index), region = found->second.local, exposed] {
    return worker->group().Expose(region->memory(), exposed.get());
  });
  if (!status.ok()) return status;
  exposures_.emplace(ExposureKey(exposed->nics.front(), exposed->slices.front().keys.front()), group_index);
  *descriptor = std::move(*exposed);
  return status;
}

Status Engine::Fence(const RegionDescriptor& exposure) {
  const bool has_key = !exposure.nics.empty() && !exposure.slices.empty() && !exposure.slices.front().keys.empty();
  const auto found =
      has_key ? exposures_.find({exposure.nics.front(), exposure.slices.front().keys.front()}) : exposures_.end();
  if (found == exposures_.end()) {
    return Status::Invalid("fence", "the descriptor is not of an exposure that is open");
  }
  Status status = worker(found->second)->Put([worker = worker(found->second), exposure] { worker->Fence(exposure); });
  if (status.ok()) exposures_.erase(found);
  return status;
}

Status Engine::Connect(std::span<const uint8_t> address, uint32_t* peer_id) {
  std::vector<NicAddress> addresses;
  if (Status status = DecodeNicAddresses(address, &addresses); !status.ok()) return status;
  Status status =
      worker(0)->Call([worker = worker(0), addresses] { return worker->group().CheckAddresses(addresses); });
  if (!status.ok()) return status;
  const uint32_t new_id = next_id_++;
  for (const auto& group : plane_->groups) {
    status = group->worker.Put(
        [worker = &group->worker, new_id, addresses] { worker->sender().AddPeer(new_id, addresses); });
    if (!status.ok()) return status;
  }
  peers_.emplace(new_id, Peer{.num_nics = addresses.size(), .reached = {}});
  *peer_id = new_id;
  return status;
}

Status Engine::Disconnect(uint32_t peer_id) {
  if (!peers_.contains(peer_id)) return Status::Invalid("disconnect", "no peer " + std::to_string(peer_id));
  for (const auto& group : plane_->groups) {
    Status status =
        group->worker.Put([worker = &group->worker, peer_id] { worker->sender().RemovePeer(peer_id, MonotonicNs()); });
    if (!status.ok()) return status;
  }
  peers_.erase(peer_id);
  std::erase_if(remote_regions_, [&](const auto& entry) { return entry.second->peer_id() == peer_id; });
  return Status::Ok();
}

Status Engine::Attach(uint32_t peer_id, RegionDescriptor descriptor, uint32_t* remote_region_id) {
  const auto peer = peers_.find(peer_id);
  if (peer == peers_.end()) return Status::Invalid("attach", "no peer " + std::to_string(peer_id));
  if (Status status = RemoteRegion::Validate(descriptor, peer->second.num_nics); !status.ok()) return status;
  *remote_region_id = next_id_++;
  remote_regions_.emplace(*remote_region_id, std::make_shared<const RemoteRegion>(peer_id, std::move(descriptor)));
  return Status::Ok();
}

Status Engine::FindTarget(const char* call, uint32_t peer_id, uint32_t target,
                          std::shared_ptr<const RemoteRegion>* region) const {
  if (!peers_.contains(peer_id)) return Status::Invalid(call, "no peer " + std::to_string(peer_id));
  const auto found = remote_regions_.find(target);
  if (found == remote_regions_.end() || found->second->peer_id() != peer_id) {
    return Status::Invalid(call, "no region " + std::to_string(target) + " of peer " + std::to_string(peer_id));
  }
  *region = found->second;
  return Status::Ok();
}

Status Engine::FillSpec(PushRequest request, PushSpec* spec, size_t* group_index) const {
  std::shared_ptr<const RemoteRegion> target;
  if (Status status = FindTarget("arm", request.peer_id, request.target, &target); !status.ok()) return status;
  const auto source = regions_.find(request.source);
  if (source == regions_.end()) return Status::Invalid("arm", "no region " + std::to_string(request.source));
  if (request.first_due_tick > 0 && !plane_->groups.front()->watcher) {
    return Status::Invalid("arm", "a push that waits for a tick needs a watched layer counter");
  }
  *group_index = source->second.group_index;
  *spec = {.push_id = request.push_id,
           .peer_id = request.peer_id,
           .immediate = request.immediate,
           .source = source->second.local,
           .target = std::move(target),
           .source_pages = std::move(request.source_pages),
           .target_pages = std::move(request.target_pages),
           .num_layers = request.num_layers,
           .run_bytes = request.run_bytes,
           .first_due_tick = request.first_due_tick,
           .first_pair = request.first_pair};
  return spec->Validate();
}

bool Engine::WaitsToArm(const PushRequest& request) const {
  const auto peer = peers_.find(request.peer_id);
  const auto source = regions_.find(request.source);
  const auto target = remote_regions_.find(request.target);
  return peer != peers_.end() && source != regions_.end() && target != remote_regions_.end() &&
         !peer->second.reached.contains({source->second.group_index, target->second->nics()});
}

Status Engine::OpenRoutes(size_t group_index, const PushSpec& spec) {
  auto& reached = peers_.at(spec.peer_id).reached;
  const auto entry = std::make_pair(group_index, spec.target->nics());
  if (reached.contains(entry)) return Status::Ok();
  Status status = worker(group_index)
                      ->Call([worker = worker(group_index), peer_id = spec.peer_id, source = spec.source,
                              target = spec.target] { return worker->sender().OpenRoutes(peer_id, *source, *target); });
  if (status.ok()) reached.insert(entry);
  return status;
}

Status Engine::Arm(PushRequest request) {
  auto spec = std::make_shared<PushSpec>();
  size_t group_index = 0;
  if (Status status = FillSpec(std::move(request), spec.get(), &group_index); !status.ok()) return status;
  if (pushes_.contains(spec->push_id)) {
    return Status::Invalid("arm", "push " + std::to_string(spec->push_id) + " has not ended yet");
  }
  if (pushes_.size() >= kMaxPushes) {
    return Status::Capacity("arm", std::to_string(kMaxPushes) + " pushes are armed already");
  }
  if (Status status = OpenRoutes(group_index, *spec); !status.ok()) return status;
  const uint64_t push_id = spec->push_id;
  Status status =
      worker(group_index)->Put([worker = worker(group_index), spec] { worker->sender().Arm(std::move(*spec)); });
  if (status.ok()) pushes_.emplace(push_id, group_index);
  return status;
}

Status Engine::Cancel(uint64_t push_id) {
  const auto found = pushes_.find(push_id);
  if (found == pushes_.end()) return Status::Ok();  // It has ended.
  return worker(found->second)->Put([worker = worker(found->second), push_id] { worker->sender().Cancel(push_id); });
}

Status Engine::Flush(uint64_t flush_id, uint32_t peer_id, std::span<const uint32_t> targets, int64_t deadline_ns) {
  if (targets.empty()) return Status::Invalid("flush", "no region to write the flush word to");
  std::vector<std::shared_ptr<const RemoteRegion>> regions(targets.size());
  for (size_t i = 0; i < targets.size(); ++i) {
    if (Status status = FindTarget("flush", peer_id, targets[i], &regions[i]); !status.ok()) return status;
    if (regions[i]->num_bytes() < kFlushWordBytes) {
      return Status::Invalid("flush", "a region has no room for the flush word");
    }
  }
  if (flushes_.contains(flush_id)) {
    return Status::Invalid("flush", "flush " + std::to_string(flush_id) + " has not ended yet");
  }
  if (flushes_.size() >= kMaxFlushes) return Status::Capacity("flush", "too many flushes have not ended");
  const auto parts = std::make_shared<FlushParts>(flush_id, plane_->groups.size(), &plane_->events);
  for (const auto& group : plane_->groups) {
    Status status =
        group->worker.Put([worker = &group->worker, spec = FlushSpec{parts, peer_id, regions, deadline_ns}] {
          worker->sender().BeginFlush(spec);
        });
    if (!status.ok()) return status;
  }
  flushes_.insert(flush_id);
  return Status::Ok();
}

std::vector<Event> Engine::Poll() {
  std::vector<Event> events = plane_->events.Drain();
  for (const Event& event : events) {
    if (const auto* push = std::get_if<PushEnded>(&event)) pushes_.erase(push->push_id);
    if (const auto* flush = std::get_if<FlushEnded>(&event)) flushes_.erase(flush->flush_id);
  }
  return events;
}

uint64_t Engine::Total(std::atomic<uint64_t> FabricCounters::* counter) const {
  uint64_t total = 0;
  for (const auto& group : plane_->groups) total += (group->counters.*counter).load(std::memory_order_relaxed);
  return total;
}

std::vector<uint64_t> Engine::BytesPostedByNic() const {
  std::vector<uint64_t> bytes;
  for (const auto& group : plane_->groups) {
    for (const auto& posted : group->counters.bytes_posted_by_nic) {
      bytes.push_back(posted.load(std::memory_order_relaxed));
    }
  }
  return bytes;
}

}  // namespace pdserve::fabric
