// A push: the writes of one handoff's pages in every layer, posted layer by layer as the layer counter rises.
//
// A single write is a push of one layer and one page.
//
// Thread safety: PushSpec is a value. A PagePush belongs to the sender's thread.

#ifndef PDSERVE_FABRIC_PAGE_PUSH_H_
#define PDSERVE_FABRIC_PAGE_PUSH_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "fabric/event_queue.h"
#include "fabric/region.h"
#include "fabric/status.h"
#include "fabric/striping.h"

namespace pdserve::fabric {

// Where the pages of one side lie: page i of layer L starts at offset + L * layer_bytes + pages[i] * page_bytes.
struct PageGeometry {
  std::vector<uint32_t> pages;
  uint64_t offset;
  uint64_t page_bytes;
  uint64_t layer_bytes;

  uint64_t OffsetOf(uint32_t layer, size_t index) const {
    return offset + layer * layer_bytes + pages[index] * page_bytes;
  }
};

struct PushSpec {
  uint64_t push_id;
  uint32_t peer_id;
  uint32_t immediate;
  std::shared_ptr<const LocalRegion> source;
  std::shared_ptr<const RemoteRegion> target;
  PageGeometry source_pages;
  PageGeometry target_pages;
  uint32_t num_layers;
  uint64_t run_bytes;
  // Layer L is due when the layer counter has reached first_due_tick + L; 0 is always due.
  uint64_t first_due_tick;
  // The pair of NICs that write 0 of each layer goes over.
  uint64_t first_pair = 0;

  Striping striping() const { return {source->num_nics(), static_cast<uint32_t>(target->nics().size())}; }
  // Invalid unless every write of the push is inside both regions, whatever the numbers (no wrap-around).
  Status Validate() const;
};

class PagePush {
 public:
  // REQUIRES: spec.Validate().ok().
  explicit PagePush(PushSpec spec);

  const PushSpec& spec() const { return spec_; }
  uint64_t num_writes() const { return uint64_t{spec_.num_layers} * spec_.source_pages.pages.size(); }

  // --- the cursor over the writes; a write that crosses slices goes in pieces, the last of which has the immediate.
  bool AllPosted() const { return layer_ == spec_.num_layers; }
  // REQUIRES: !AllPosted(), for all of these.
  uint32_t layer() const { return layer_; }
  uint64_t due_tick() const { return spec_.first_due_tick + layer_; }
  // All pieces of a write go over one pair.
  NicPair NextPair() const { return spec_.striping().PairOf(spec_.first_pair + page_); }
  Piece NextPiece() const;
  bool IsLastPiece(const Piece& piece) const { return piece_offset_ + piece.num_bytes == spec_.run_bytes; }
  // The layer is entered: `computed_ns` is when the rank ticked.
  void BeginLayer(int64_t computed_ns);
  void PiecePosted(const Piece& piece, int64_t now_ns);

  // --- what became of the pieces
  void PieceEnded(uint32_t layer, bool is_last_piece, int64_t now_ns);
  uint64_t num_in_flight() const { return num_in_flight_; }

  // --- how it ends; the first reason stays
  void Stop(PushOutcome outcome, int error);
  // What is in flight has no owner any more: libfabric may still read the source, or never come back.
  void Orphan(int error);
  bool stopped() const { return outcome_ != PushOutcome::kDone; }
  // Nothing of it is posted and nothing more will be.
  bool Ended() const { return num_in_flight_ == 0 && (stopped() || AllPosted()); }
  PushEnded TakeEnd() { return {spec_.push_id, outcome_, error_, std::move(layer_times_)}; }

 private:
  const PushSpec spec_;
  uint32_t layer_ = 0;
  size_t page_ = 0;
  uint64_t piece_offset_ = 0;
  uint64_t num_in_flight_ = 0;
  PushOutcome outcome_ = PushOutcome::kDone;
  int error_ = 0;
  std::vector<LayerTimes> layer_times_;
  std::vector<size_t> num_unfinished_;  // Writes of each layer that have not completed.
};

}  // namespace pdserve::fabric

#endif  // PDSERVE_FABRIC_PAGE_PUSH_H_
