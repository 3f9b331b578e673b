"""Which source rank writes which bytes of a page to which destination rank, and how many writes a handoff consists of.

The one place that knows. Both sides call it with both shardings, so the receiver can count exactly (DESIGN section 4).
A page goes over once for each (source, destination) pair of ranks: when a chunk completes it, or, incomplete, with the
last chunk.

Where several source ranks hold the same heads, one of them serves a whole destination replica set. Which one is hashed
from the handoff id, so that all of them send.
"""

from dataclasses import dataclass

from pdserve.ids import HandoffId
from pdserve.kv.layout import KvLayout
from pdserve.kv.shard import KvSharding
from pdserve.units import div_ceil, div_exact

_GOLDEN_RATIO = 0x9E3779B97F4A7C15
"""Its fraction in 64 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPair:
    """One run of heads, the same in every page and layer, from a source rank to a destination rank."""

    source_rank: int
    target_rank: int
    source_offset: int
    """Bytes from the start of a page of the source rank to the run."""
    target_offset: int
    run_bytes: int


def rank_pairs(source: KvSharding, target: KvSharding, *, handoff_id: HandoffId) -> tuple[RankPair, ...]:
    """Who writes what: every byte of a destination page is in the run of exactly one pair.

    Requires: both shardings valid and of one layout. Cost: proportional to the pairs, at most `source.num_ranks +
    target.num_ranks` of them for each destination replica.
    """
    head_bytes = source.layout.head_bytes
    replica = _chosen_replica(handoff_id, num_replicas=source.num_replicas)
    pairs: list[RankPair] = []
    for target_set in range(target.num_replica_sets):
        wanted = target.heads_of_set(target_set)
        for source_set in _sets_with(source, wanted):
            held = source.heads_of_set(source_set)
            start, stop = max(wanted.start, held.start), min(wanted.stop, held.stop)
            pairs.extend(
                RankPair(
                    source_rank=source.ranks_of_set(source_set)[replica],
                    target_rank=target_rank,
                    source_offset=(start - held.start) * head_bytes,
                    target_offset=(start - wanted.start) * head_bytes,
                    run_bytes=(stop - start) * head_bytes,
                )
                for target_rank in target.ranks_of_set(target_set)
            )
    return tuple(pairs)


def num_rank_pairs(source: KvSharding, target: KvSharding) -> int:
    """As many as `rank_pairs` returns, whatever the handoff id."""
    return target.num_replicas * sum(
        len(_sets_with(source, target.heads_of_set(target_set))) for target_set in range(target.num_replica_sets)
    )


def pages_completed(*, start: int, stop: int, is_last: bool, page_slots: int) -> range:
    """Positions in the sequence of the pages that a chunk of tokens `[start, stop)` completes."""
    return range(start // page_slots, div_ceil(stop, page_slots) if is_last else stop // page_slots)


def draft_pages_completed(*, start: int, stop: int, is_last: bool, page_slots: int) -> range:
    """The same in a drafter's cache, which lags by a token: a head computes a slot from the token after it.

    The slot after the last chunk stays empty: the decode worker fills it, with the hidden state in the tail.
    """
    return range(
        max(start - 1, 0) // page_slots, div_ceil(stop, page_slots) if is_last else max(stop - 1, 0) // page_slots
    )


def pages_to_write(*, num_held_tokens: int, num_prompt_tokens: int, page_slots: int) -> range:
    """Positions of all pages of a handoff: of tokens `[num_held_tokens, num_prompt_tokens - 1)`.

    The last prompt token is computed by the decode worker. Requires: `num_held_tokens` is a multiple of `page_slots`.
    """
    first = div_exact(num_held_tokens, page_slots)
    return range(first, div_ceil(num_prompt_tokens - 1, page_slots))


def num_writes(
    source: KvSharding,
    target: KvSharding,
    *,
    num_held_tokens: int,
    num_prompt_tokens: int,
    draft_layout: KvLayout | None = None,
) -> int:
    """Writes of a whole handoff: each page in each layer for each pair of ranks, once in each layer of the drafter's
    cache, which is whole on rank 0 of both sides, and the tail."""
    layout = target.layout
    pages = pages_to_write(
        num_held_tokens=num_held_tokens, num_prompt_tokens=num_prompt_tokens, page_slots=layout.page_slots
    )
    num_draft_layers = draft_layout.num_layers if draft_layout is not None else 0
    return len(pages) * (layout.num_layers * num_rank_pairs(source, target) + num_draft_layers) + 1


def _sets_with(sharding: KvSharding, heads: range) -> range:
    """The replica sets that hold any of `heads`."""
    return range(heads.start // sharding.heads_per_rank, div_ceil(heads.stop, sharding.heads_per_rank))


def _chosen_replica(handoff_id: HandoffId, *, num_replicas: int) -> int:
    """Multiplicative hashing by the golden ratio, which spreads any run of ids evenly, and nearly any of every k-th id:
    a decode worker's handoffs that one of k prefill workers gets.

    Source: Knuth, The Art of Computer Programming, volume 3, section 6.4, theorem S.
    """
    fraction = handoff_id * _GOLDEN_RATIO % 2**64
    return fraction * num_replicas >> 64
