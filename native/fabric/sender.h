// Posts what is armed in one domain group, as it becomes due, and ends each push and flush exactly once.
//
// A route leads from one of the group's NICs to one of a peer's. A push goes over the routes that its striping names,
// one write after the other: a route that takes no more holds up the push, and so does each of the others in its turn.
//
// Thread safety: none; it belongs to the worker thread.
//
// Invariants:
//   1. A push ends after all its posted writes have ended (rule H3), or after its peer was removed and did not drain in
//      time: then the rest is orphaned, the push has failed, and forgetting the route stops what was not sent.
//   2. At most kWindowWrites writes are in flight on a route. fi_cancel cancels nothing, so a cancelled push still
//      waits for up to one window a route.
//   3. A flush is posted when nothing to the peer is in flight, and nothing is posted to the peer before that. It has a
//      write on each route, in the order of posting. So its completion proves the delivery of everything before it.
//   4. After a write to a peer failed, on any route, nothing more is posted to it: its pushes and flushes fail at once.
//      Only a peer that is removed and added again takes writes again.
//   5. A peer that accepts no write for kRefusalDeadlineNs has failed: libfabric asks to try again for ever when a tcp
//      peer is dead.

#ifndef PDSERVE_FABRIC_SENDER_H_
#define PDSERVE_FABRIC_SENDER_H_

#include <rdma/fabric.h>

#include <cerrno>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

#include "fabric/event_queue.h"
#include "fabric/fabric_counters.h"
#include "fabric/flush_parts.h"
#include "fabric/nic_addresses.h"
#include "fabric/page_push.h"
#include "fabric/write_port.h"
#include "layer_counter/layer_counter.h"

namespace pdserve::fabric {

// More gained nothing on tcp and shm at 4 KiB to 1 MiB; less starves 4 KiB pages.
inline constexpr uint32_t kWindowWrites = 64;

// A connection on a busy machine opens in tens of milliseconds; a peer's process that has no time for 5 s is as good as
// dead to requests whose TTFT is a second.
inline constexpr int64_t kRefusalDeadlineNs = 5'000'000'000;

// A full window of 1 MiB pages drains in 30 ms on loopback and 60 ms at 10 Gbit/s; a peer that is removed and needs
// longer is not answering.
inline constexpr int64_t kRemovalDrainNs = 500'000'000;

inline constexpr uint64_t kFlushWordBytes = 8;

// The errno of what failed because its peer did.
inline constexpr int kPeerLostError = EHOSTDOWN;

// This group's part of a flush.
struct FlushSpec {
  std::shared_ptr<FlushParts> parts;
  uint32_t peer_id;
  // With at least as many bytes as the flush word has.
  std::vector<std::shared_ptr<const RemoteRegion>> targets;
  int64_t deadline_ns;
};

class Sender {
 public:
  // `peer_failed` is called, with an errno, when a write to a peer failed: other groups may have routes to it.
  // All pointers outlive the sender.
  Sender(WritePort* port, EventQueue* events, FabricCounters* counters, const LocalRegion* zero_word,
         bool reorders_writes, std::function<void(uint32_t, int)> peer_failed);

  void AddPeer(uint32_t peer_id, std::vector<NicAddress> addresses);
  // Ends what is armed to the peer, and closes its routes when they have drained, or are given up.
  void RemovePeer(uint32_t peer_id, int64_t now_ns);
  // Another group found that the peer failed.
  void PeerFailed(uint32_t peer_id, int error);
  // Opens those of the routes between the two regions that are not open.
  Status OpenRoutes(uint32_t peer_id, const LocalRegion& source, const RemoteRegion& target);
  // REQUIRES: OpenRoutes came before, for the two regions, and succeeded.
  void Arm(PushSpec spec);
  void Cancel(uint64_t push_id);
  void BeginFlush(FlushSpec spec);
  // A completion whose context came from this sender.
  void WriteEnded(void* context, int error, int64_t now_ns);

  // Posts what is due and fits into the windows, and ends what is past its deadline. `counter` is null when none is
  // watched.
  void Advance(const LayerCounter* counter, int64_t now_ns);

  // The lowest tick that a push waits for, UINT64_MAX when none does.
  uint64_t NextTick() const { return waiting_.empty() ? UINT64_MAX : waiting_.begin()->first; }
  // A peer refused a write and is to be tried again soon.
  bool MustRetry() const { return num_refusing_ > 0; }
  uint64_t num_in_flight() const { return counters_->num_in_flight.load(std::memory_order_relaxed); }
  void CancelAll();

 private:
  struct RouteKey {
    uint32_t local_nic;   // Of the group.
    uint32_t remote_nic;  // Of all that the peer has.
    auto operator<=>(const RouteKey&) const = default;
  };

  struct Route {
    PeerRoute to;
    uint32_t num_in_flight = 0;
  };

  struct Flush {
    FlushSpec spec;
    std::vector<std::pair<Route*, Piece>> writes;
    size_t num_posted = 0;
    size_t num_ended = 0;
  };

  struct Peer {
    std::vector<NicAddress> addresses;
    std::map<RouteKey, Route> routes;  // Stable addresses.
    uint32_t num_in_flight = 0;        // On all routes.
    int error = 0;                     // Not 0: failed (invariant 4).
    int64_t refused_since_ns = 0;      // Not 0: the last try to post was refused.
    int64_t drain_until_ns = 0;        // Not 0: being removed.
    std::deque<uint64_t> ready;        // Pushes whose next layer is due; may name pushes that have ended.
    std::deque<Flush> flushes;         // That have not ended, in order.
  };

  // One posted write. libfabric owns the address from Write to its completion, so writes are never freed, only reused.
  struct PostedWrite {
    fi_context2 context;  // First: its address is what libfabric is given.
    enum class Kind { kPush, kFlush, kOrphan } kind;
    uint32_t peer_id;
    Route* route;
    uint64_t id;  // Of the push or flush.
    uint32_t layer;
    bool is_last_piece;
  };

  enum class Posted { kYes, kRefused, kPeerFailed };

  void ReleaseDuePushes();
  void AdvancePeer(Peer& peer, int64_t now_ns);
  // Posts of the first ready push until it is not due, has no more, or the peer takes no more. False in the last case.
  bool AdvanceReadyPush(Peer& peer, int64_t now_ns);
  Posted PostPiece(Peer& peer, Route& route, PagePush& push, const Piece& piece, int64_t now_ns);
  // False when the flush is to be tried again later, or failed with its peer.
  bool PostFlush(Peer& peer, Flush& flush, int64_t now_ns);
  // Takes the write over, or gives it back to free_writes_.
  Posted Post(PostedWrite* write, Peer& peer, WriteRequest request, int64_t now_ns);
  std::vector<std::pair<Route*, Piece>> FlushWrites(Peer& peer, const FlushSpec& spec);
  void SetRefused(Peer& peer, int64_t since_ns);
  void CheckDeadlines(int64_t now_ns);
  // True when the peer is to be erased.
  bool CheckRemoval(uint32_t peer_id, Peer& peer, int64_t now_ns);
  void ExpireFlushes(Peer& peer, int64_t now_ns);
  // Says so to the other groups; StopPeer does not.
  void FailPeer(uint32_t peer_id, Peer& peer, int error);
  void StopPeer(uint32_t peer_id, Peer& peer, int error);
  int64_t TickNs(uint64_t tick) const;
  void StopPushesOf(uint32_t peer_id, PushOutcome outcome, int error);
  void OrphanWritesOf(uint32_t peer_id);
  void PushWriteEnded(const PostedWrite& write, Peer& peer, int error, int64_t now_ns);
  void FlushWriteEnded(const PostedWrite& write, Peer& peer);
  void FinishIfEnded(uint64_t push_id);
  PostedWrite* TakeWrite(const PostedWrite& filled);

  WritePort* const port_;
  EventQueue* const events_;
  FabricCounters* const counters_;
  const LocalRegion* const zero_word_;
  const bool reorders_writes_;
  const std::function<void(uint32_t, int)> peer_failed_;

  std::unordered_map<uint32_t, Peer> peers_;
  std::unordered_map<uint64_t, std::unique_ptr<PagePush>> pushes_;
  std::set<std::pair<uint64_t, uint64_t>> waiting_;  // Next due tick and push.
  std::deque<PostedWrite> writes_;                   // Stable addresses.
  std::vector<PostedWrite*> free_writes_;
  uint32_t num_refusing_ = 0;
  const LayerCounter* counter_ = nullptr;  // As of the last Advance, as is ticks_.
  uint64_t ticks_ = 0;
};

}  // namespace pdserve::fabric

#endif  // PDSERVE_FABRIC_SENDER_H_
