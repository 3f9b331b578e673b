#include "fabric/sender.h"

#include <algorithm>
#include <iterator>
#include <unordered_set>

namespace pdserve::fabric {

Sender::Sender(WritePort* port, EventQueue* events, FabricCounters* counters, const LocalRegion* zero_word,
               bool reorders_writes, std::function<void(uint32_t, int)> peer_failed)
    : port_(port),
      events_(events),
      counters_(counters),
      zero_word_(zero_word),
      reorders_writes_(reorders_writes),
      peer_failed_(std::move(peer_failed)) {}

void Sender::AddPeer(uint32_t peer_id, std::vector<NicAddress> addresses) {
  peers_[peer_id].addresses = std::move(addresses);
}

void Sender::RemovePeer(uint32_t peer_id, int64_t now_ns) {
  const auto found = peers_.find(peer_id);
  if (found == peers_.end() || found->second.drain_until_ns != 0) return;
  Peer& peer = found->second;
  StopPushesOf(peer_id, PushOutcome::kCancelled, 0);
  StopPeer(peer_id, peer, kPeerLostError);
  peer.drain_until_ns = now_ns + kRemovalDrainNs;
}

void Sender::PeerFailed(uint32_t peer_id, int error) {
  if (const auto found = peers_.find(peer_id); found != peers_.end()) StopPeer(peer_id, found->second, error);
}

Status Sender::OpenRoutes(uint32_t peer_id, const LocalRegion& source, const RemoteRegion& target) {
  const auto found = peers_.find(peer_id);
  if (found == peers_.end() || found->second.error != 0) return Status::Ok();  // What is armed to it fails at once.
  Peer& peer = found->second;
  const Striping striping = {source.num_nics(), static_cast<uint32_t>(target.nics().size())};
  for (uint32_t i = 0; i < striping.num_pairs(); ++i) {
    const NicPair pair = striping.PairOf(i);
    const RouteKey key = {pair.local, target.nics()[pair.remote]};
    if (peer.routes.contains(key)) continue;
    Route route;
    Status status = port_->OpenRoute(key.local_nic, peer.addresses[key.remote_nic], &route.to);
    if (!status.ok()) return status;
    peer.routes.emplace(key, route);
  }
  return Status::Ok();
}

void Sender::Arm(PushSpec spec) {
  const uint64_t push_id = spec.push_id;
  const auto peer = peers_.find(spec.peer_id);
  auto push = std::make_unique<PagePush>(std::move(spec));
  if (peer == peers_.end() || peer->second.error != 0) {
    push->Stop(PushOutcome::kFailed, peer == peers_.end() ? kPeerLostError : peer->second.error);
  }
  const PagePush& armed = *pushes_.emplace(push_id, std::move(push)).first->second;
  counters_->num_armed_pushes.fetch_add(1, std::memory_order_relaxed);
  if (!armed.Ended()) waiting_.emplace(armed.due_tick(), push_id);
  FinishIfEnded(push_id);
}

void Sender::Cancel(uint64_t push_id) {
  const auto found = pushes_.find(push_id);
  if (found == pushes_.end()) return;
  found->second->Stop(PushOutcome::kCancelled, 0);
  FinishIfEnded(push_id);
}

void Sender::CancelAll() {
  std::vector<uint64_t> push_ids;
  for (const auto& [push_id, push] : pushes_) push_ids.push_back(push_id);
  for (const uint64_t push_id : push_ids) Cancel(push_id);
}

void Sender::BeginFlush(FlushSpec spec) {
  const auto found = peers_.find(spec.peer_id);
  const int error = found == peers_.end() ? kPeerLostError : found->second.error;
  if (error != 0) return spec.parts->PartEnded(error);
  Peer& peer = found->second;
  std::vector<std::pair<Route*, Piece>> writes = FlushWrites(peer, spec);
  if (writes.empty()) return spec.parts->PartEnded(0);  // Nothing of this group went to the targets.
  peer.flushes.push_back({.spec = std::move(spec), .writes = std::move(writes)});
}

std::vector<std::pair<Sender::Route*, Piece>> Sender::FlushWrites(Peer& peer, const FlushSpec& spec) {
  std::vector<std::pair<Route*, Piece>> writes;
  std::set<RouteKey> seen;
  const uint64_t num_bytes = zero_word_->num_bytes();
  for (const auto& target : spec.targets) {
    const Striping striping = {zero_word_->num_nics(), static_cast<uint32_t>(target->nics().size())};
    for (uint32_t i = 0; i < striping.num_pairs(); ++i) {
      const NicPair pair = striping.PairOf(i);
      const auto route = peer.routes.find({pair.local, target->nics()[pair.remote]});
      if (route == peer.routes.end() || !seen.insert(route->first).second) continue;
      writes.emplace_back(&route->second,
                          FirstPiece(*zero_word_, 0, *target, target->num_bytes() - num_bytes, pair, num_bytes));
    }
  }
  return writes;
}

void Sender::Advance(const LayerCounter* counter, int64_t now_ns) {
  counter_ = counter;
  ticks_ = counter != nullptr ? counter->ticks.load(std::memory_order_acquire) : 0;
  ReleaseDuePushes();
  for (auto& [peer_id, peer] : peers_) AdvancePeer(peer, now_ns);
  CheckDeadlines(now_ns);
}

void Sender::ReleaseDuePushes() {
  while (!waiting_.empty() && waiting_.begin()->first <= ticks_) {
    const uint64_t push_id = waiting_.begin()->second;
    waiting_.erase(waiting_.begin());
    peers_.at(pushes_.at(push_id)->spec().peer_id).ready.push_back(push_id);
  }
}

void Sender::AdvancePeer(Peer& peer, int64_t now_ns) {
  for (size_t i = 0; peer.error == 0 && i < peer.flushes.size(); ++i) {
    if (!PostFlush(peer, peer.flushes[i], now_ns)) return;
  }
  while (peer.error == 0 && !peer.ready.empty()) {
    if (!AdvanceReadyPush(peer, now_ns)) return;
  }
  SetRefused(peer, 0);  // What was refused has been cancelled since.
}

bool Sender::AdvanceReadyPush(Peer& peer, int64_t now_ns) {
  const uint64_t push_id = peer.ready.front();
  const auto found = pushes_.find(push_id);
  while (found != pushes_.end() && !found->second->stopped() && !found->second->AllPosted()) {
    PagePush& push = *found->second;
    if (push.due_tick() > ticks_) {
      waiting_.emplace(push.due_tick(), push_id);
      break;
    }
    const NicPair pair = push.NextPair();
    Route& route = peer.routes.at({pair.local, push.spec().target->nics()[pair.remote]});
    if (route.num_in_flight >= kWindowWrites) return false;
    push.BeginLayer(TickNs(push.due_tick()));
    const Piece piece = push.NextPiece();
    const bool is_last_piece = push.IsLastPiece(piece);
    if (PostPiece(peer, route, push, piece, now_ns) != Posted::kYes) return false;
    // The rest of a write that crosses slices waits for this piece, so that its immediate comes after all of it.
    if (!is_last_piece) break;
  }
  peer.ready.pop_front();
  return true;
}

Sender::Posted Sender::PostPiece(Peer& peer, Route& route, PagePush& push, const Piece& piece, int64_t now_ns) {
  const bool is_last_piece = push.IsLastPiece(piece);
  PostedWrite* write = TakeWrite({.context = {},
                                  .kind = PostedWrite::Kind::kPush,
                                  .peer_id = push.spec().peer_id,
                                  .route = &route,
                                  .id = push.spec().push_id,
                                  .layer = push.layer(),
                                  .is_last_piece = is_last_piece});
  const Posted posted = Post(write, peer,
                             {.piece = piece,
                              .route = route.to,
                              .has_immediate = is_last_piece,
                              .immediate = push.spec().immediate,
                              .delivery_complete = reorders_writes_ || !is_last_piece,
                              .context = write},
                             now_ns);
  if (posted == Posted::kYes) push.PiecePosted(piece, now_ns);
  return posted;
}

bool Sender::PostFlush(Peer& peer, Flush& flush, int64_t now_ns) {
  if (flush.num_posted == 0 && peer.num_in_flight > 0) return false;
  while (flush.num_posted < flush.writes.size()) {
    const auto& [route, piece] = flush.writes[flush.num_posted];
    PostedWrite* write = TakeWrite({.context = {},
                                    .kind = PostedWrite::Kind::kFlush,
                                    .peer_id = flush.spec.peer_id,
                                    .route = route,
                                    .id = flush.spec.parts->flush_id(),
                                    .layer = 0,
                                    .is_last_piece = true});
    const Posted posted = Post(write, peer,
                               {.piece = piece,
                                .route = route->to,
                                .has_immediate = false,
                                .immediate = 0,
                                .delivery_complete = true,
                                .context = write},
                               now_ns);
    if (posted != Posted::kYes) return false;  // A peer that failed has taken the flush with it.
    ++flush.num_posted;
  }
  return true;
}

Sender::Posted Sender::Post(PostedWrite* write, Peer& peer, WriteRequest request, int64_t now_ns) {
  request.context = write;
  const int error = port_->Write(request);
  if (error != 0) free_writes_.push_back(write);
  if (error == EAGAIN) {
    if (peer.refused_since_ns == 0) SetRefused(peer, now_ns);
    return Posted::kRefused;
  }
  if (error != 0) {
    FailPeer(write->peer_id, peer, error);
    return Posted::kPeerFailed;
  }
  SetRefused(peer, 0);
  ++peer.num_in_flight;
  ++write->route->num_in_flight;
  counters_->num_in_flight.fetch_add(1, std::memory_order_relaxed);
  counters_->num_writes_posted.fetch_add(1, std::memory_order_relaxed);
  counters_->bytes_posted_by_nic[request.route.local_nic].fetch_add(request.piece.num_bytes, std::memory_order_relaxed);
  return Posted::kYes;
}

void Sender::SetRefused(Peer& peer, int64_t since_ns) {
  if (peer.refused_since_ns != 0) --num_refusing_;
  peer.refused_since_ns = since_ns;
  if (since_ns != 0) ++num_refusing_;
}

void Sender::WriteEnded(void* context, int error, int64_t now_ns) {
  const PostedWrite write = *static_cast<PostedWrite*>(context);
  free_writes_.push_back(static_cast<PostedWrite*>(context));
  if (write.kind == PostedWrite::Kind::kOrphan) return;
  Peer& peer = peers_.at(write.peer_id);
  --peer.num_in_flight;
  --write.route->num_in_flight;
  counters_->num_in_flight.fetch_sub(1, std::memory_order_relaxed);
  if (error == 0) {
    SetRefused(peer, 0);
    counters_->num_writes_completed.fetch_add(1, std::memory_order_relaxed);
  } else {
    counters_->num_writes_failed.fetch_add(1, std::memory_order_relaxed);
    FailPeer(write.peer_id, peer, error);
  }
  if (write.kind == PostedWrite::Kind::kPush) {
    PushWriteEnded(write, peer, error, now_ns);
  } else {
    FlushWriteEnded(write, peer);
  }
}

void Sender::FlushWriteEnded(const PostedWrite& write, Peer& peer) {
  // One that has ended without this write, for its deadline or with its peer, is not found. Its id may be in use again,
  // but not posted: that waits for this write.
  const auto flush = std::find_if(peer.flushes.begin(), peer.flushes.end(), [&](const Flush& open) {
    return open.num_posted > 0 && open.spec.parts->flush_id() == write.id;
  });
  if (flush == peer.flushes.end() || ++flush->num_ended < flush->writes.size()) return;
  flush->spec.parts->PartEnded(0);
  peer.flushes.erase(flush);
}

void Sender::PushWriteEnded(const PostedWrite& write, Peer& peer, int error, int64_t now_ns) {
  PagePush& push = *pushes_.at(write.id);
  push.PieceEnded(write.layer, write.is_last_piece && error == 0, now_ns);
  if (!write.is_last_piece && !push.stopped()) peer.ready.push_front(write.id);
  FinishIfEnded(write.id);
}

void Sender::FinishIfEnded(uint64_t push_id) {
  const auto found = pushes_.find(push_id);
  PagePush& push = *found->second;
  if (!push.Ended()) return;
  if (!push.AllPosted()) waiting_.erase({push.due_tick(), push_id});
  events_->Push(push.TakeEnd());
  pushes_.erase(found);
  counters_->num_armed_pushes.fetch_sub(1, std::memory_order_relaxed);
}

void Sender::FailPeer(uint32_t peer_id, Peer& peer, int error) {
  if (peer.error != 0) return;
  StopPeer(peer_id, peer, error);
  peer_failed_(peer_id, error);
}

void Sender::StopPeer(uint32_t peer_id, Peer& peer, int error) {
  if (peer.error != 0) return;
  peer.error = error;
  SetRefused(peer, 0);
  for (const Flush& flush : peer.flushes) flush.spec.parts->PartEnded(error);
  peer.flushes.clear();
  peer.ready.clear();
  StopPushesOf(peer_id, PushOutcome::kFailed, error);
}

void Sender::StopPushesOf(uint32_t peer_id, PushOutcome outcome, int error) {
  std::vector<uint64_t> push_ids;
  for (const auto& [push_id, push] : pushes_) {
    if (push->spec().peer_id == peer_id) push_ids.push_back(push_id);
  }
  for (const uint64_t push_id : push_ids) {
    pushes_.at(push_id)->Stop(outcome, error);
    FinishIfEnded(push_id);
  }
}

void Sender::CheckDeadlines(int64_t now_ns) {
  for (auto at = peers_.begin(); at != peers_.end();) {
    auto& [peer_id, peer] = *at;
    if (peer.refused_since_ns != 0 && now_ns - peer.refused_since_ns >= kRefusalDeadlineNs) {
      FailPeer(peer_id, peer, kPeerLostError);
    }
    ExpireFlushes(peer, now_ns);
    at = CheckRemoval(peer_id, peer, now_ns) ? peers_.erase(at) : std::next(at);
  }
}

void Sender::ExpireFlushes(Peer& peer, int64_t now_ns) {
  std::erase_if(peer.flushes, [&](const Flush& flush) {
    const bool expired = flush.spec.deadline_ns <= now_ns;
    if (expired) flush.spec.parts->PartEnded(ETIMEDOUT);
    return expired;
  });
}

bool Sender::CheckRemoval(uint32_t peer_id, Peer& peer, int64_t now_ns) {
  if (peer.drain_until_ns == 0) return false;
  if (peer.num_in_flight > 0) {
    if (now_ns < peer.drain_until_ns) return false;
    OrphanWritesOf(peer_id);
  }
  for (const auto& [key, route] : peer.routes) port_->CloseRoute(route.to);
  return true;
}

void Sender::OrphanWritesOf(uint32_t peer_id) {
  const std::unordered_set<PostedWrite*> free(free_writes_.begin(), free_writes_.end());
  std::set<uint64_t> push_ids;
  for (PostedWrite& write : writes_) {
    if (write.peer_id != peer_id || write.kind == PostedWrite::Kind::kOrphan || free.contains(&write)) continue;
    if (write.kind == PostedWrite::Kind::kPush) push_ids.insert(write.id);
    write.kind = PostedWrite::Kind::kOrphan;
    counters_->num_in_flight.fetch_sub(1, std::memory_order_relaxed);
    counters_->num_writes_failed.fetch_add(1, std::memory_order_relaxed);
  }
  // Last, so that whoever sees a push end sees its writes in the totals.
  for (const uint64_t push_id : push_ids) {
    pushes_.at(push_id)->Orphan(kPeerLostError);
    FinishIfEnded(push_id);
  }
}

Sender::PostedWrite* Sender::TakeWrite(const PostedWrite& filled) {
  if (free_writes_.empty()) {
    writes_.push_back(filled);
    return &writes_.back();
  }
  PostedWrite* write = free_writes_.back();
  free_writes_.pop_back();
  *write = filled;
  return write;
}

int64_t Sender::TickNs(uint64_t tick) const {
  const bool in_ring = tick > 0 && tick <= ticks_ && ticks_ - tick < LayerCounter::kRingTicks;
  return in_ring ? counter_->TickNs(tick) : 0;
}

}  // namespace pdserve::fabric
