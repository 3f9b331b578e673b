// One fabric: its regions, peers and counters, as the thread that uses it sees them.
//
// Thread safety: one calling thread. The data plane runs on the worker thread and the watcher thread.
// Lifetime: registered memory and the watched counter outlive the engine, or its Close.
//
// Invariants:
//   1. Nothing is handed to the worker thread before its regions, keys and bounds were checked here.
//   2. What is started ends in exactly one event, unless the engine is closed first.
//   3. Each table has a bound; beyond it a call is refused with Capacity, and nothing has changed.

#ifndef PDSERVE_FABRIC_ENGINE_H_
#define PDSERVE_FABRIC_ENGINE_H_

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "fabric/event_queue.h"
#include "fabric/fabric_counters.h"
#include "fabric/immediate_table.h"
#include "fabric/layer_watcher.h"
#include "fabric/page_push.h"
#include "fabric/worker.h"

namespace pdserve::fabric {

class Engine {
 public:
  // A worker serves at most some hundred requests, each with a push for each of its chunks.
  static constexpr size_t kMaxPushes = 4096;
  static constexpr size_t kMaxFlushes = 4096;
  // Two regions for each peer.
  static constexpr size_t kMaxExposures = 4096;

  struct Options {
    std::string provider;
    std::string bind_host;
    uint64_t max_slice_bytes = kMaxSliceBytes;
  };

  static Status Open(const Options& options, std::unique_ptr<Engine>* engine);

  const std::vector<uint8_t>& address() const { return address_; }

  Status Watch(char* address, uint64_t num_bytes);
  Status Register(char* address, uint64_t num_bytes, uint32_t* region_id);
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
  };
  Status Arm(PushRequest request);
  Status Cancel(uint64_t push_id);
  Status Flush(uint64_t flush_id, uint32_t peer_id, uint32_t target, int64_t deadline_ns);

  Status Expect(const ImmediateTable::Expectation& expectation) { return plane_->immediates.Expect(expectation); }
  void Forget(uint32_t immediate) { plane_->immediates.Forget(immediate); }

  std::vector<Event> Poll();
  int event_fd() const { return plane_->events.fd(); }
  const FabricCounters& counters() const { return plane_->counters; }
  // False when the worker thread hangs in the provider; then it and what it uses are left behind.
  bool Close();

 private:
  // What the worker thread uses.
  struct DataPlane {
    EventQueue events;
    FabricCounters counters;
    ImmediateTable immediates{&events};
    Worker worker{&events, &counters, &immediates};
    std::unique_ptr<LayerWatcher> watcher;

    // False when the worker thread was left behind. The watched memory may go away after it.
    bool Stop() {
      const bool stopped = worker.Stop();
      if (watcher) watcher->Stop();
      return stopped;
    }
  };
  struct DataPlaneCloser {
    void operator()(DataPlane* plane) const {
      if (plane->Stop()) delete plane;
    }
  };

  Engine() : plane_(new DataPlane()) {}
  Worker* worker() const { return &plane_->worker; }
  Status FindTarget(const char* call, uint32_t peer_id, uint32_t target,
                    std::shared_ptr<const RemoteRegion>* region) const;

  std::vector<uint8_t> address_;
  std::unique_ptr<DataPlane, DataPlaneCloser> plane_;

  // The calling thread's own.
  std::unordered_map<uint32_t, std::shared_ptr<const LocalRegion>> regions_;
  std::unordered_map<uint32_t, std::shared_ptr<const RemoteRegion>> remote_regions_;
  std::unordered_set<uint32_t> peers_;
  std::unordered_set<uint64_t> pushes_;     // Armed, or their end was not polled yet.
  std::unordered_set<uint64_t> flushes_;    // Likewise.
  std::unordered_set<uint64_t> exposures_;  // The keys of their first slices.
  uint32_t next_id_ = 1;
};

}  // namespace pdserve::fabric

#endif  // PDSERVE_FABRIC_ENGINE_H_
