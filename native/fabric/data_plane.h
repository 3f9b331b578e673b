// What the worker threads of one fabric share, and what each has of its own.
//
// Thread safety: built, started and stopped by one thread; `events` and `immediates` are for all.
// Lifetime: one whose Stop returned false must never be destroyed: a thread is still inside the provider.

#ifndef PDSERVE_FABRIC_DATA_PLANE_H_
#define PDSERVE_FABRIC_DATA_PLANE_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "fabric/event_queue.h"
#include "fabric/fabric_counters.h"
#include "fabric/immediate_table.h"
#include "fabric/layer_watcher.h"
#include "fabric/worker.h"

namespace pdserve::fabric {

class DataPlane {
 public:
  // A domain group: a thread and its NICs.
  struct Group {
    Group(size_t num_nics, DataPlane* plane)
        : counters(num_nics),
          worker(&plane->events, &counters, &plane->immediates,
                 [this, plane](uint32_t peer_id, int error) { plane->TellOthers(this, peer_id, error); }) {}

    FabricCounters counters;
    Worker worker;
    std::shared_ptr<LayerWatcher> watcher;  // Once there is a counter.
  };

  explicit DataPlane(const std::vector<size_t>& num_nics_by_group);

  EventQueue events;
  ImmediateTable immediates{&events};
  std::vector<std::unique_ptr<Group>> groups;

  // Ends all threads, at the same time. False when a worker thread was left behind. The watched memory may go away
  // after it.
  bool Stop();

 private:
  // On `from`'s worker thread: a peer that failed there takes no more writes from the other groups.
  void TellOthers(const Group* from, uint32_t peer_id, int error);
};

}  // namespace pdserve::fabric

#endif  // PDSERVE_FABRIC_DATA_PLANE_H_
