#include "fabric/page_push.h"

#include <algorithm>
#include <string>

namespace pdserve::fabric {
namespace {

using Wide = unsigned __int128;  // Holds any sum of products of two 64-bit numbers here.

Status CheckSide(const char* side, const PushSpec& spec, const PageGeometry& geometry, uint64_t region_bytes) {
  const uint32_t last_page = *std::max_element(geometry.pages.begin(), geometry.pages.end());
  const Wide end = Wide{geometry.offset} + Wide{spec.num_layers - 1} * geometry.layer_bytes +
                   Wide{last_page} * geometry.page_bytes + spec.run_bytes;
  if (end <= region_bytes) return Status::Ok();
  return Status::Invalid("arm", "push " + std::to_string(spec.push_id) + " would leave the " + side + " region of " +
                                    std::to_string(region_bytes) + " bytes (highest page " + std::to_string(last_page) +
                                    ")");
}

}  // namespace

Status PushSpec::Validate() const {
  if (source_pages.pages.size() != target_pages.pages.size()) {
    return Status::Invalid("arm", std::to_string(source_pages.pages.size()) + " source pages for " +
                                      std::to_string(target_pages.pages.size()) + " target pages");
  }
  if (target->peer_id() != peer_id) return Status::Invalid("arm", "the target region belongs to another peer");
  if (num_layers == 0 || run_bytes == 0) return Status::Invalid("arm", "a push has at least one layer and one byte");
  if (source_pages.pages.empty()) return Status::Ok();
  if (Status status = CheckSide("source", *this, source_pages, source->num_bytes()); !status.ok()) return status;
  return CheckSide("target", *this, target_pages, target->num_bytes());
}

PagePush::PagePush(PushSpec spec)
    : spec_(std::move(spec)),
      layer_times_(spec_.num_layers),
      num_unfinished_(spec_.num_layers, spec_.source_pages.pages.size()) {
  if (spec_.source_pages.pages.empty()) layer_ = spec_.num_layers;
}

Piece PagePush::NextPiece() const {
  return FirstPiece(*spec_.source, spec_.source_pages.OffsetOf(layer_, page_) + piece_offset_, *spec_.target,
                    spec_.target_pages.OffsetOf(layer_, page_) + piece_offset_, NextPair(),
                    spec_.run_bytes - piece_offset_);
}

void PagePush::BeginLayer(int64_t computed_ns) {
  if (layer_times_[layer_].computed_ns == 0) layer_times_[layer_].computed_ns = computed_ns;
}

void PagePush::PiecePosted(const Piece& piece, int64_t now_ns) {
  ++num_in_flight_;
  if (layer_times_[layer_].posted_ns == 0) layer_times_[layer_].posted_ns = now_ns;
  piece_offset_ += piece.num_bytes;
  if (piece_offset_ < spec_.run_bytes) return;
  piece_offset_ = 0;
  if (++page_ < spec_.source_pages.pages.size()) return;
  page_ = 0;
  ++layer_;
}

void PagePush::PieceEnded(uint32_t layer, bool is_last_piece, int64_t now_ns) {
  --num_in_flight_;
  if (is_last_piece && --num_unfinished_[layer] == 0) layer_times_[layer].completed_ns = now_ns;
}

void PagePush::Stop(PushOutcome outcome, int error) {
  if (stopped()) return;
  outcome_ = outcome;
  error_ = error;
}

void PagePush::Orphan(int error) {
  num_in_flight_ = 0;
  outcome_ = PushOutcome::kFailed;
  error_ = error;
}

}  // namespace pdserve::fabric
