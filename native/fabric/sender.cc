#include "fabric/sender.h"

#include <iterator>
#include <unordered_set>

namespace pdserve::fabric {

Sender::Sender(WritePort* port, EventQueue* events, FabricCounters* counters, const LocalRegion* zero_word,
               bool reorders_writes, std::function<void(const PeerRoute&)> forget_route)
    : port_(port),
      events_(events),
      counters_(counters),
      zero_word_(zero_word),
      reorders_writes_(reorders_writes),
      forget_route_(std::move(forget_route)) {}

void Sender::AddPeer(uint32_t peer_id, const PeerRoute& route) { peers_[peer_id].route = route; }

void Sender::RemovePeer(uint32_t peer_id, int64_t now_ns) {
  const auto found = peers_.find(peer_id);
  if (found == peers_.end() || found->second.drain_until_ns != 0) return;
  Peer& peer = found->second;
  StopPushesOf(peer_id, PushOutcome::kCancelled, 0);
  FailPeer(peer_id, peer, kPeerLostError);
  peer.drain_until_ns = now_ns + kRemovalDrainNs;
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

void Sender::Flush(FlushSpec spec) {
  const auto found = peers_.find(spec.peer_id);
  const int error = found == peers_.end() ? kPeerLostError : found->second.error;
  if (error != 0) {
    events_->Push(FlushEnded{spec.flush_id, false, error});
  } else {
    found->second.flushes.push_back(std::move(spec));
  }
}

void Sender::Advance(const LayerCounter* counter, int64_t now_ns) {
  counter_ = counter;
  ticks_ = counter != nullptr ? counter->ticks.load(std::memory_order_acquire) : 0;
  ReleaseDuePushes();
  for (auto& [peer_id, peer] : peers_) AdvancePeer(peer_id, peer, now_ns);
  CheckDeadlines(now_ns);
}

void Sender::ReleaseDuePushes() {
  while (!waiting_.empty() && waiting_.begin()->first <= ticks_) {
    const uint64_t push_id = waiting_.begin()->second;
    waiting_.erase(waiting_.begin());
    peers_.at(pushes_.at(push_id)->spec().peer_id).ready.push_back(push_id);
  }
}

void Sender::AdvancePeer(uint32_t peer_id, Peer& peer, int64_t now_ns) {
  while (peer.error == 0 && !peer.flushes.empty()) {
    if (peer.num_in_flight > 0 || !PostFlush(peer_id, peer, now_ns)) return;
  }
  while (peer.error == 0 && !peer.ready.empty()) {
    if (!AdvanceReadyPush(peer_id, peer, now_ns)) return;
  }
}

bool Sender::AdvanceReadyPush(uint32_t peer_id, Peer& peer, int64_t now_ns) {
  const uint64_t push_id = peer.ready.front();
  const auto found = pushes_.find(push_id);
  while (found != pushes_.end() && !found->second->stopped() && !found->second->AllPosted()) {
    PagePush& push = *found->second;
    if (push.due_tick() > ticks_) {
      waiting_.emplace(push.due_tick(), push_id);
      break;
    }
    if (peer.num_in_flight >= kWindowWrites) return false;
    push.BeginLayer(TickNs(push.due_tick()));
    const Piece piece = push.NextPiece();
    const bool is_last_piece = push.IsLastPiece(piece);
    if (PostPiece(peer_id, peer, push, piece, now_ns) != Posted::kYes) return false;
    // The rest of a write that crosses slices waits for this piece, so that its immediate comes after all of it.
    if (!is_last_piece) break;
  }
  peer.ready.pop_front();
  return true;
}

Sender::Posted Sender::PostPiece(uint32_t peer_id, Peer& peer, PagePush& push, const Piece& piece, int64_t now_ns) {
  const bool is_last_piece = push.IsLastPiece(piece);
  PostedWrite* write = TakeWrite({.context = {},
                                  .kind = PostedWrite::Kind::kPush,
                                  .peer_id = peer_id,
                                  .id = push.spec().push_id,
                                  .layer = push.layer(),
                                  .is_last_piece = is_last_piece});
  const Posted posted = Post(peer_id, peer,
                             {.piece = piece,
                              .route = peer.route,
                              .has_immediate = is_last_piece,
                              .immediate = push.spec().immediate,
                              .delivery_complete = reorders_writes_ || !is_last_piece,
                              .context = write},
                             now_ns);
  if (posted == Posted::kYes) {
    push.PiecePosted(piece, now_ns);
  } else {
    free_writes_.push_back(write);
  }
  return posted;
}

bool Sender::PostFlush(uint32_t peer_id, Peer& peer, int64_t now_ns) {
  const FlushSpec& flush = peer.flushes.front();
  PostedWrite* write = TakeWrite({.context = {},
                                  .kind = PostedWrite::Kind::kFlush,
                                  .peer_id = peer_id,
                                  .id = flush.flush_id,
                                  .layer = 0,
                                  .is_last_piece = true});
  const uint64_t num_bytes = zero_word_->num_bytes();
  const Posted posted =
      Post(peer_id, peer,
           {.piece = FirstPiece(*zero_word_, 0, *flush.target, flush.target->num_bytes() - num_bytes, num_bytes),
            .route = peer.route,
            .has_immediate = false,
            .immediate = 0,
            .delivery_complete = true,
            .context = write},
           now_ns);
  if (posted != Posted::kYes) {
    free_writes_.push_back(write);
    return false;
  }
  peer.posted_flushes.emplace(flush.flush_id, flush.deadline_ns);
  peer.flushes.pop_front();
  return true;
}

Sender::Posted Sender::Post(uint32_t peer_id, Peer& peer, const WriteRequest& request, int64_t now_ns) {
  const int error = port_->Write(request);
  if (error == EAGAIN) {
    if (peer.refused_since_ns == 0) SetRefused(peer, now_ns);
    return Posted::kRefused;
  }
  if (error != 0) {
    FailPeer(peer_id, peer, error);
    return Posted::kPeerFailed;
  }
  SetRefused(peer, 0);
  ++peer.num_in_flight;
  counters_->num_in_flight.fetch_add(1, std::memory_order_relaxed);
  counters_->num_writes_posted.fetch_add(1, std::memory_order_relaxed);
  counters_->bytes_posted.fetch_add(request.piece.num_bytes, std::memory_order_relaxed);
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
  } else if (peer.posted_flushes.erase(write.id) > 0) {
    events_->Push(FlushEnded{write.id, error == 0, error});
  }
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
  peer.error = error;
  SetRefused(peer, 0);
  EndFlushes(peer, error);
  peer.ready.clear();
  StopPushesOf(peer_id, PushOutcome::kFailed, error);
}

void Sender::EndFlushes(Peer& peer, int error) {
  for (const FlushSpec& flush : peer.flushes) events_->Push(FlushEnded{flush.flush_id, false, error});
  for (const auto& [flush_id, deadline_ns] : peer.posted_flushes) events_->Push(FlushEnded{flush_id, false, error});
  peer.flushes.clear();
  peer.posted_flushes.clear();
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
  std::erase_if(peer.flushes, [&](const FlushSpec& flush) {
    const bool expired = flush.deadline_ns <= now_ns;
    if (expired) events_->Push(FlushEnded{flush.flush_id, false, ETIMEDOUT});
    return expired;
  });
  std::erase_if(peer.posted_flushes, [&](const auto& flush) {
    const bool expired = flush.second <= now_ns;
    if (expired) events_->Push(FlushEnded{flush.first, false, ETIMEDOUT});
    return expired;
  });
}

bool Sender::CheckRemoval(uint32_t peer_id, Peer& peer, int64_t now_ns) {
  if (peer.drain_until_ns == 0) return false;
  if (peer.num_in_flight > 0) {
    if (now_ns < peer.drain_until_ns) return false;
    OrphanWritesOf(peer_id);
  }
  forget_route_(peer.route);
  return true;
}

void Sender::OrphanWritesOf(uint32_t peer_id) {
  const std::unordered_set<PostedWrite*> free(free_writes_.begin(), free_writes_.end());
  for (PostedWrite& write : writes_) {
    if (write.peer_id != peer_id || write.kind == PostedWrite::Kind::kOrphan || free.contains(&write)) continue;
    const bool of_push = write.kind == PostedWrite::Kind::kPush;
    write.kind = PostedWrite::Kind::kOrphan;
    counters_->num_in_flight.fetch_sub(1, std::memory_order_relaxed);
    counters_->num_writes_failed.fetch_add(1, std::memory_order_relaxed);
    if (const auto push = pushes_.find(write.id); of_push && push != pushes_.end()) {
      push->second->Orphan(kPeerLostError);
      FinishIfEnded(write.id);
    }
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
