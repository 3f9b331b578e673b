#include "fabric/engine.h"

#include <utility>

namespace pdserve::fabric {

Status Engine::Open(const Options& options, std::unique_ptr<Engine>* engine) {
  const Provider* provider = nullptr;
  if (Status status = FindProvider(options.provider, &provider); !status.ok()) return status;
  if (options.max_slice_bytes == 0) return Status::Invalid("open", "a slice has at least one byte");
  std::unique_ptr<Engine> opened(new Engine());
  if (Status status = opened->worker()->Start(*provider, options.bind_host, options.max_slice_bytes); !status.ok()) {
    return status;
  }
  Worker* worker = opened->worker();
  auto address = std::make_shared<std::vector<uint8_t>>();
  Status status = worker->Call([worker, address] {
    *address = worker->domain().address();
    return Status::Ok();
  });
  if (!status.ok()) return status;
  opened->address_ = std::move(*address);
  *engine = std::move(opened);
  return Status::Ok();
}

bool Engine::Close() {
  const bool stopped = plane_->Stop();
  plane_->events.Drain();
  return stopped;
}

Status Engine::Watch(char* address, uint64_t num_bytes) {
  if (plane_->watcher) return Status::Invalid("watch", "this fabric watches a layer counter already");
  if (num_bytes < sizeof(LayerCounter) || reinterpret_cast<uintptr_t>(address) % alignof(LayerCounter) != 0) {
    return Status::Invalid("watch", "a layer counter has " + std::to_string(sizeof(LayerCounter)) + " bytes, not " +
                                        std::to_string(num_bytes));
  }
  plane_->watcher =
      std::make_unique<LayerWatcher>(reinterpret_cast<LayerCounter*>(address), [worker = worker()] { worker->Wake(); });
  return worker()->Put([worker = worker(), watcher = plane_->watcher.get()] { worker->Watch(watcher); });
}

Status Engine::Register(char* address, uint64_t num_bytes, uint32_t* region_id) {
  if (num_bytes == 0) return Status::Invalid("register", "a region has at least one byte");
  auto region = std::make_shared<std::shared_ptr<const LocalRegion>>();
  Status status = worker()->Call([worker = worker(), address, num_bytes, region] {
    return worker->RegisterSource(address, num_bytes, region.get());
  });
  if (!status.ok()) return status;
  *region_id = next_id_++;
  regions_.emplace(*region_id, std::move(*region));
  return status;
}

Status Engine::Expose(uint32_t region_id, RegionDescriptor* descriptor) {
  const auto found = regions_.find(region_id);
  if (found == regions_.end()) return Status::Invalid("expose", "no region " + std::to_string(region_id));
  if (exposures_.size() >= kMaxExposures) return Status::Capacity("expose", "too many regions are exposed");
  auto exposed = std::make_shared<RegionDescriptor>();
  Status status = worker()->Call([worker = worker(), region = found->second, exposed] {
    return worker->Expose(region->address(), region->num_bytes(), exposed.get());
  });
  if (!status.ok()) return status;
  exposures_.insert(exposed->slices.front().key);
  *descriptor = std::move(*exposed);
  return status;
}

Status Engine::Fence(const RegionDescriptor& exposure) {
  if (exposure.slices.empty() || !exposures_.contains(exposure.slices.front().key)) {
    return Status::Invalid("fence", "the descriptor is not of an exposure that is open");
  }
  Status status = worker()->Put([worker = worker(), exposure] { worker->Fence(exposure); });
  if (status.ok()) exposures_.erase(exposure.slices.front().key);
  return status;
}

Status Engine::Connect(std::span<const uint8_t> address, uint32_t* peer_id) {
  const uint32_t new_id = next_id_++;
  Status status = worker()->Call(
      [worker = worker(), new_id, address = std::vector<uint8_t>(address.begin(), address.end())]() -> Status {
        PeerRoute route;
        if (Status inserted = worker->domain().InsertPeer(address, &route); !inserted.ok()) return inserted;
        worker->sender().AddPeer(new_id, route);
        return Status::Ok();
      });
  if (!status.ok()) return status;
  peers_.insert(new_id);
  *peer_id = new_id;
  return status;
}

Status Engine::Disconnect(uint32_t peer_id) {
  if (!peers_.contains(peer_id)) return Status::Invalid("disconnect", "no peer " + std::to_string(peer_id));
  Status status = worker()->Put([worker = worker(), peer_id] { worker->sender().RemovePeer(peer_id, MonotonicNs()); });
  if (!status.ok()) return status;
  peers_.erase(peer_id);
  std::erase_if(remote_regions_, [&](const auto& entry) { return entry.second->peer_id() == peer_id; });
  return status;
}

Status Engine::Attach(uint32_t peer_id, RegionDescriptor descriptor, uint32_t* remote_region_id) {
  if (!peers_.contains(peer_id)) return Status::Invalid("attach", "no peer " + std::to_string(peer_id));
  if (Status status = RemoteRegion::Validate(descriptor); !status.ok()) return status;
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

Status Engine::Arm(PushRequest request) {
  std::shared_ptr<const RemoteRegion> target;
  if (Status status = FindTarget("arm", request.peer_id, request.target, &target); !status.ok()) return status;
  const auto source = regions_.find(request.source);
  if (source == regions_.end()) return Status::Invalid("arm", "no region " + std::to_string(request.source));
  if (request.first_due_tick > 0 && !plane_->watcher) {
    return Status::Invalid("arm", "a push that waits for a tick needs a watched layer counter");
  }
  auto spec = std::make_shared<PushSpec>(PushSpec{.push_id = request.push_id,
                                                  .peer_id = request.peer_id,
                                                  .immediate = request.immediate,
                                                  .source = source->second,
                                                  .target = std::move(target),
                                                  .source_pages = std::move(request.source_pages),
                                                  .target_pages = std::move(request.target_pages),
                                                  .num_layers = request.num_layers,
                                                  .run_bytes = request.run_bytes,
                                                  .first_due_tick = request.first_due_tick});
  if (Status status = spec->Validate(); !status.ok()) return status;
  if (pushes_.contains(spec->push_id)) {
    return Status::Invalid("arm", "push " + std::to_string(spec->push_id) + " has not ended yet");
  }
  if (pushes_.size() >= kMaxPushes) {
    return Status::Capacity("arm", std::to_string(kMaxPushes) + " pushes are armed already");
  }
  const uint64_t push_id = spec->push_id;
  Status status = worker()->Put([worker = worker(), spec] { worker->sender().Arm(std::move(*spec)); });
  if (status.ok()) pushes_.insert(push_id);
  return status;
}

Status Engine::Cancel(uint64_t push_id) {
  if (!pushes_.contains(push_id)) return Status::Ok();  // It has ended.
  return worker()->Put([worker = worker(), push_id] { worker->sender().Cancel(push_id); });
}

Status Engine::Flush(uint64_t flush_id, uint32_t peer_id, uint32_t target, int64_t deadline_ns) {
  std::shared_ptr<const RemoteRegion> region;
  if (Status status = FindTarget("flush", peer_id, target, &region); !status.ok()) return status;
  if (region->num_bytes() < 8) return Status::Invalid("flush", "the region has no room for the flush word");
  if (flushes_.contains(flush_id)) {
    return Status::Invalid("flush", "flush " + std::to_string(flush_id) + " has not ended yet");
  }
  if (flushes_.size() >= kMaxFlushes) return Status::Capacity("flush", "too many flushes have not ended");
  Status status = worker()->Put([worker = worker(), spec = FlushSpec{flush_id, peer_id, std::move(region),
                                                                     deadline_ns}] { worker->sender().Flush(spec); });
  if (status.ok()) flushes_.insert(flush_id);
  return status;
}

std::vector<Event> Engine::Poll() {
  std::vector<Event> events = plane_->events.Drain();
  for (const Event& event : events) {
    if (const auto* push = std::get_if<PushEnded>(&event)) pushes_.erase(push->push_id);
    if (const auto* flush = std::get_if<FlushEnded>(&event)) flushes_.erase(flush->flush_id);
  }
  return events;
}

}  // namespace pdserve::fabric
