// One fabric: its regions, peers and counters, as the thread that uses it sees them.
//
// Thread safety: one calling thread. The data plane runs on a worker thread and a watcher thread for each domain group.
// Lifetime: registered memory and the watched counter outlive the engine, or its Close.
//
// Invariants:
//   1. Nothing is handed to a worker thread before its regions, keys and bounds were checked here.
//   2. What is started ends in exactly one event, unless the engine is closed first.
//   3. Each table has a bound; beyond it a call is refused with Capacity, and nothing has changed.

#ifndef PDSERVE_FABRIC_ENGINE_H_
#define PDSERVE_FABRIC_ENGINE_H_

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "fabric/data_plane.h"
#include "fabric/page_push.h"

namespace pdserve::fabric {

class Engine {
 public:
  // A worker serves at most some hundred requests, each with a push for each of its chunks.
  static constexpr size_t kMaxPushes = 4096;
  static constexpr size_t kMaxFlushes = 4096;
  // Two regions for each peer.
  static constexpr size_t kMaxExposures = 4096;

  struct GroupOptions {
    std::vector<std::string> bind_hosts;  // One a NIC.
    std::vector<uint32_t> cpus;           // Of the group's threads; empty: any.
  };

  struct Options {
    std::string provider;
    std::vector<GroupOptions> groups;
    uint64_t max_slice_bytes = kMaxSliceBytes;
    bool device_memory = false;  // GPU memory may be registered; refused where the provider can't reach it.
  };

  static Status Open(const Options& options, std::unique_ptr<Engine>* engine);

  // Of all NICs; see nic_addresses.h.
  const std::vector<uint8_t>& address() const { return address_; }

  Status Watch(char* address, uint64_t num_bytes);
  // Invalid when it is a GPU's memory and the engine was opened without `device_memory`.
  Status Register(const Memory& memory, size_t group_index, uint32_t* region_id);
  Status Expose(uint32_t region_id, RegionDescriptor* descriptor);
  Status Fence(const RegionDescriptor& exposure);
  Status Connect(std::span<const uint8_t> address, uint32_t* peer_id);
  Status Disconnect(uint32_t peer_id);
  Status Attach(uint32_t peer_id, RegionDescriptor descriptor, uint32_t* remote_region_id);

  // What a caller of Arm says; the ids are looked up.
  struct PushRequest {
    uint64_t push_id;
    uint32_t peer_id;
    uint32_t source;
    uint32_t target;
    uint32_t immediate;
    PageGeometry source_pages;
    PageGeometry target_pages;
    uint32_t num_layers;
    uint64_t run_bytes;
    uint64_t first_due_tick;
    uint64_t first_pair = 0;
  };
  Status Arm(PushRequest request);
  // Arm will wait for the worker thread: it is the first push of its kind between these NICs.
  bool WaitsToArm(const PushRequest& request) const;
  Status Cancel(uint64_t push_id);
  Status Flush(uint64_t flush_id, uint32_t peer_id, std::span<const uint32_t> targets, int64_t deadline_ns);

  Status Expect(const ImmediateTable::Expectation& expectation) { return plane_->immediates.Expect(expectation); }
  void Forget(uint32_t immediate) { plane_->immediates.Forget(immediate); }

  std::vector<Event> Poll();
  int event_fd() const { return plane_->events.fd(); }
  // Over all groups.
  uint64_t Total(std::atomic<uint64_t> FabricCounters::* counter) const;
  std::vector<uint64_t> BytesPostedByNic() const;
  // False when a worker thread hangs in the provider; then it and what it uses are left behind.
  bool Close();

 private:
  struct DataPlaneCloser {
    void operator()(DataPlane* plane) const {
      if (plane->Stop()) delete plane;
    }
  };

  struct Region {
    size_t group_index;
    std::shared_ptr<const LocalRegion> local;
  };

  struct Peer {
    size_t num_nics;
    // A group and the NICs of a target: its routes there are open.
    std::set<std::pair<size_t, std::vector<uint32_t>>> reached;
  };

  // The NIC and key of an exposure's first slice.
  using ExposureKey = std::pair<uint32_t, uint64_t>;

  Engine(const std::vector<size_t>& num_nics_by_group, bool device_memory)
      : device_memory_(device_memory), plane_(new DataPlane(num_nics_by_group)) {}
  static Status Validate(const Options& options, const Provider& provider);
  Status StartWorkers(const Options& options, const Provider& provider);
  Worker* worker(size_t group_index) const { return &plane_->groups[group_index]->worker; }
  Status FindTarget(const char* call, uint32_t peer_id, uint32_t target,
                    std::shared_ptr<const RemoteRegion>* region) const;
  Status FillSpec(PushRequest request, PushSpec* spec, size_t* group_index) const;
  Status OpenRoutes(size_t group_index, const PushSpec& spec);

  const bool device_memory_;
  std::vector<uint8_t> address_;
  std::unique_ptr<DataPlane, DataPlaneCloser> plane_;

  // The calling thread's own.
  std::unordered_map<uint32_t, Region> regions_;
  std::unordered_map<uint32_t, std::shared_ptr<const RemoteRegion>> remote_regions_;
  std::unordered_map<uint32_t, Peer> peers_;
  std::unordered_map<uint64_t, size_t> pushes_;  // Armed, or their end was not polled yet; with their group.
  std::unordered_set<uint64_t> flushes_;         // Likewise.
  std::map<ExposureKey, size_t> exposures_;      // With their group.
  uint32_t next_id_ = 1;
};

}  // namespace pdserve::fabric

#endif  // PDSERVE_FABRIC_ENGINE_H_
