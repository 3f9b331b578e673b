#include "fabric/data_plane.h"

#include <algorithm>
#include <chrono>

namespace pdserve::fabric {

DataPlane::DataPlane(const std::vector<size_t>& num_nics_by_group) {
  for (const size_t num_nics : num_nics_by_group) groups.push_back(std::make_unique<Group>(num_nics, this));
}

bool DataPlane::Stop() {
  using Clock = std::chrono::steady_clock;
  for (const auto& group : groups) group->worker.BeginStop();
  const Clock::time_point deadline = Clock::now() + Worker::kStopDeadline;
  bool all_stopped = true;
  for (const auto& group : groups) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now());
    all_stopped &= group->worker.Stop(std::max(left, std::chrono::milliseconds(0)));
    if (group->watcher) group->watcher->Stop();
  }
  return all_stopped;
}

void DataPlane::TellOthers(const Group* from, uint32_t peer_id, int error) {
  for (const auto& group : groups) {
    if (group.get() == from) continue;
    // One that is closing, or that stands still, posts nothing either.
    (void)group->worker.Put([worker = &group->worker, peer_id, error] { worker->sender().PeerFailed(peer_id, error); });
  }
}

}  // namespace pdserve::fabric
