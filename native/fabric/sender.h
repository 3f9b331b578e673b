// Posts what is armed, as it becomes due, and ends each push and flush exactly once.
//
// Thread safety: none; it belongs to the worker thread.
//
// Invariants:
//   1. A push ends after all its posted writes have ended (rule H3), or after its peer was removed and did not drain in
//      time: then the rest is orphaned, the push has failed, and forgetting the route stops what was not sent.
//   2. At most kWindowWrites writes to a peer are in flight. fi_cancel cancels nothing, so a cancelled push still
//      waits for up to one window.
//   3. A flush is posted when nothing to the peer is in flight, and nothing is posted to the peer before that. So its
//      completion proves the delivery of everything before it.
//   4. After a write to a peer failed nothing more is posted to it: its pushes and flushes fail at once. Only a peer
//      that is removed and added again takes writes again.
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

// The errno of what failed because its peer did.
inline constexpr int kPeerLostError = EHOSTDOWN;

struct FlushSpec {
  uint64_t flush_id;
  uint32_t peer_id;
  std::shared_ptr<const RemoteRegion> target;
  int64_t deadline_ns;
};

class Sender {
 public:
  // `forget_route` is called when a removed peer has drained, or was given up.
  // All pointers outlive the sender.
  Sender(WritePort* port, EventQueue* events, FabricCounters* counters, const LocalRegion* zero_word,
         bool reorders_writes, std::function<void(const PeerRoute&)> forget_route);

  void AddPeer(uint32_t peer_id, const PeerRoute& route);
  void RemovePeer(uint32_t peer_id, int64_t now_ns);
  void Arm(PushSpec spec);
  void Cancel(uint64_t push_id);
  void Flush(FlushSpec spec);
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
  bool HasPushes() const { return !pushes_.empty(); }
  void CancelAll();

 private:
  struct Peer {
    PeerRoute route;
    uint32_t num_in_flight = 0;
    int error = 0;                               // Not 0: failed (invariant 4).
    int64_t refused_since_ns = 0;                // Not 0: the last try to post was refused.
    int64_t drain_until_ns = 0;                  // Not 0: being removed.
    std::deque<uint64_t> ready;                  // Pushes whose next layer is due; may name pushes that have ended.
    std::deque<FlushSpec> flushes;               // Not posted yet.
    std::map<uint64_t, int64_t> posted_flushes;  // By id, their deadlines.
  };

  // One posted write. libfabric owns the address from Write to its completion, so writes are never freed, only reused.
  struct PostedWrite {
    fi_context2 context;  // First: its address is what libfabric is given.
    enum class Kind { kPush, kFlush, kOrphan } kind;
    uint32_t peer_id;
    uint64_t id;  // Of the push or flush.
    uint32_t layer;
    bool is_last_piece;
  };

  enum class Posted { kYes, kRefused, kPeerFailed };

  void ReleaseDuePushes();
  void AdvancePeer(uint32_t peer_id, Peer& peer, int64_t now_ns);
  // Posts of the first ready push until it is not due, has no more, or the peer takes no more. False in the last case.
  bool AdvanceReadyPush(uint32_t peer_id, Peer& peer, int64_t now_ns);
  Posted PostPiece(uint32_t peer_id, Peer& peer, PagePush& push, const Piece& piece, int64_t now_ns);
  bool PostFlush(uint32_t peer_id, Peer& peer, int64_t now_ns);
  Posted Post(uint32_t peer_id, Peer& peer, const WriteRequest& request, int64_t now_ns);
  void SetRefused(Peer& peer, int64_t since_ns);
  void CheckDeadlines(int64_t now_ns);
  // True when the peer is to be erased.
  bool CheckRemoval(uint32_t peer_id, Peer& peer, int64_t now_ns);
  void ExpireFlushes(Peer& peer, int64_t now_ns);
  void FailPeer(uint32_t peer_id, Peer& peer, int error);
  void EndFlushes(Peer& peer, int error);
  int64_t TickNs(uint64_t tick) const;
  void StopPushesOf(uint32_t peer_id, PushOutcome outcome, int error);
  void OrphanWritesOf(uint32_t peer_id);
  void PushWriteEnded(const PostedWrite& write, Peer& peer, int error, int64_t now_ns);
  void FinishIfEnded(uint64_t push_id);
  PostedWrite* TakeWrite(const PostedWrite& filled);

  WritePort* const port_;
  EventQueue* const events_;
  FabricCounters* const counters_;
  const LocalRegion* const zero_word_;
  const bool reorders_writes_;
  const std::function<void(const PeerRoute&)> forget_route_;

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
