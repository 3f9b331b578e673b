"""Which source rank writes which bytes, against a reference that looks at every byte of every destination page; which
pages a chunk completes, against one that walks over single tokens."""

import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.pure.shardings import SMALL_PAIRS, heads_held, large_pairs, rank_counts, sharding

from pdserve.ids import HandoffId
from pdserve.kv.layout import KvLayout
from pdserve.kv.shard import KvSharding
from pdserve.transfer.plan import (
    RankPair,
    draft_pages_completed,
    num_rank_pairs,
    num_writes,
    pages_completed,
    pages_to_write,
    rank_pairs,
)

BALANCED = 0.10
"""How far the load of a source rank may be from the mean over 1,000 handoffs."""


@dataclass(frozen=True, slots=True)
class Byte:
    """What a byte of a page is."""

    head: int
    plane: int
    slot: int
    position: int


def page_of(shards: KvSharding, rank: int) -> list[Byte]:
    """What each byte of a page of a rank is: head by head, plane by plane, slot by slot."""
    layout = shards.layout
    return [
        Byte(*part)
        for part in product(
            heads_held(layout.num_kv_heads, shards.num_ranks, rank),
            range(layout.num_planes),
            range(layout.page_slots),
            range(layout.slot_bytes),
        )
    ]


def require_exactly_one_writer(source: KvSharding, target: KvSharding, pairs: Iterable[RankPair]) -> None:
    """Every byte of every destination page is written once, with the same byte of a rank that holds it."""
    sources = [page_of(source, rank) for rank in range(source.num_ranks)]
    written: dict[tuple[int, int], Byte] = {}
    for pair in pairs:
        assert pair.run_bytes > 0
        for position in range(pair.run_bytes):
            place = (pair.target_rank, pair.target_offset + position)
            assert place not in written, f"{place} is written twice"
            written[place] = sources[pair.source_rank][pair.source_offset + position]
    wanted = {
        (rank, position): byte
        for rank in range(target.num_ranks)
        for position, byte in enumerate(page_of(target, rank))
    }
    assert written == wanted


def require_one_source_replica_each(source: KvSharding, target: KvSharding, pairs: Iterable[RankPair]) -> None:
    """A destination replica set is served, for any head, by a single source rank."""
    servers: dict[tuple[tuple[int, ...], tuple[int, ...]], set[int]] = {}
    num_heads = source.layout.num_kv_heads
    for pair in pairs:
        given = tuple(heads_held(num_heads, source.num_ranks, pair.source_rank))
        taken = tuple(heads_held(num_heads, target.num_ranks, pair.target_rank))
        servers.setdefault((given, taken), set()).add(pair.source_rank)
    assert all(len(ranks) == 1 for ranks in servers.values())


def require_sound(case: tuple[int, int, int], *, num_planes: int, handoff_id: int) -> None:
    num_heads, num_sources, num_targets = case
    source = sharding(num_heads=num_heads, num_ranks=num_sources, num_planes=num_planes)
    target = sharding(num_heads=num_heads, num_ranks=num_targets, num_planes=num_planes)
    pairs = rank_pairs(source, target, handoff_id=HandoffId(handoff_id))
    require_exactly_one_writer(source, target, pairs)
    require_one_source_replica_each(source, target, pairs)
    assert len({(pair.source_rank, pair.target_rank) for pair in pairs}) == len(pairs) == num_rank_pairs(source, target)


@pytest.mark.parametrize("num_heads", range(1, 13))
def test_rank_pairs_of_all_small_shardings_write_every_byte_once(num_heads: int) -> None:
    for case in SMALL_PAIRS:
        if case[0] == num_heads:
            for handoff_id in (0, 1, 2):
                require_sound(case, num_planes=2, handoff_id=handoff_id)


@pytest.mark.parametrize("num_sources", range(1, 9))
@pytest.mark.parametrize("num_targets", range(1, 9))
def test_rank_pairs_of_mla_write_every_latent_once(num_sources: int, num_targets: int) -> None:
    for handoff_id in range(8):
        require_sound((1, num_sources, num_targets), num_planes=1, handoff_id=handoff_id)


@given(case=large_pairs(), num_planes=st.integers(1, 2), handoff_id=st.integers(0, 2**64))
def test_rank_pairs_of_large_shardings_write_every_byte_once(
    case: tuple[int, int, int], num_planes: int, handoff_id: int
) -> None:
    require_sound(case, num_planes=num_planes, handoff_id=handoff_id)


@pytest.mark.parametrize(
    ("num_heads", "num_sources", "num_targets", "expected"),
    [
        # Source and destination rank; then in heads source and destination offset, and length. Equal, joined, split.
        (2, 2, 2, [(0, 0, 0, 0, 1), (1, 1, 0, 0, 1)]),
        (3, 3, 1, [(0, 0, 0, 0, 1), (1, 0, 0, 1, 1), (2, 0, 0, 2, 1)]),
        (3, 1, 3, [(0, 0, 0, 0, 1), (0, 1, 1, 0, 1), (0, 2, 2, 0, 1)]),
        # Cuts that are not nested: the middle destination gets its heads from both sources.
        (6, 2, 3, [(0, 0, 0, 0, 2), (0, 1, 2, 0, 1), (1, 1, 0, 1, 1), (1, 2, 1, 0, 2)]),
        (6, 3, 2, [(0, 0, 0, 0, 2), (1, 0, 0, 2, 1), (1, 1, 1, 0, 1), (2, 1, 0, 1, 2)]),
        # Replicas: of handoff 0 the first rank of each source replica set, to all ranks of the destination's.
        (1, 1, 2, [(0, 0, 0, 0, 1), (0, 1, 0, 0, 1)]),
        (2, 4, 2, [(0, 0, 0, 0, 1), (2, 1, 0, 0, 1)]),
        (1, 4, 1, [(0, 0, 0, 0, 1)]),
    ],
)
def test_rank_pairs_of_known_shardings_are_these(
    num_heads: int, num_sources: int, num_targets: int, expected: list[tuple[int, int, int, int, int]]
) -> None:
    source = sharding(num_heads=num_heads, num_ranks=num_sources)
    target = sharding(num_heads=num_heads, num_ranks=num_targets)
    head_bytes = source.layout.head_bytes
    assert [
        (
            pair.source_rank,
            pair.target_rank,
            pair.source_offset // head_bytes,
            pair.target_offset // head_bytes,
            pair.run_bytes // head_bytes,
        )
        for pair in rank_pairs(source, target, handoff_id=HandoffId(0))
    ] == expected


# The load of the source ranks


def deviation(*, num_heads: int, num_sources: int, num_targets: int, handoff_ids: Iterable[int]) -> float:
    """The greatest distance of a source rank's bytes from their mean, as a part of it."""
    source = sharding(num_heads=num_heads, num_ranks=num_sources)
    target = sharding(num_heads=num_heads, num_ranks=num_targets)
    sent = Counter(dict.fromkeys(range(num_sources), 0))
    for handoff_id in handoff_ids:
        for pair in rank_pairs(source, target, handoff_id=HandoffId(handoff_id)):
            sent[pair.source_rank] += pair.run_bytes
    mean = sent.total() / num_sources
    return max(abs(num_bytes - mean) / mean for num_bytes in sent.values())


REPLICATED = [(1, 2, 1), (1, 3, 8), (1, 4, 4), (1, 8, 8), (1, 16, 1), (3, 9, 3), (3, 9, 1), (2, 8, 8), (4, 8, 2)]
"""(heads, source ranks, destination ranks) with source replica sets of 2 to 16."""


@pytest.mark.parametrize(("num_heads", "num_sources", "num_targets"), REPLICATED)
@pytest.mark.parametrize("stride", [1, 2, 3, 8])
@pytest.mark.parametrize("first", [1, 987_654])
def test_load_over_a_thousand_handoffs_is_even_over_source_ranks(
    num_heads: int, num_sources: int, num_targets: int, stride: int, first: int
) -> None:
    handoff_ids = range(first, first + 1_000 * stride, stride)
    assert (
        deviation(num_heads=num_heads, num_sources=num_sources, num_targets=num_targets, handoff_ids=handoff_ids)
        < BALANCED
    )


@pytest.mark.parametrize(("num_heads", "num_sources", "num_targets"), REPLICATED)
def test_load_over_random_handoffs_is_as_even_as_chance_allows(
    num_heads: int, num_sources: int, num_targets: int
) -> None:
    handoff_ids = random.Random(0).sample(range(1_000_000), 1_000)
    # A rank's share is binomial; four of its standard deviations.
    chance = 4 * (num_sources // num_heads / 1_000) ** 0.5
    assert (
        deviation(num_heads=num_heads, num_sources=num_sources, num_targets=num_targets, handoff_ids=handoff_ids)
        < chance
    )


def test_load_of_sources_without_replicas_is_the_same_in_every_handoff() -> None:
    source, target = sharding(num_heads=6, num_ranks=3), sharding(num_heads=6, num_ranks=2)
    assert len({rank_pairs(source, target, handoff_id=HandoffId(handoff_id)) for handoff_id in range(100)}) == 1


# Pages and counts


def pages_by_walking(*, start: int, stop: int, is_last: bool, page_slots: int) -> list[int]:
    """Pages whose last slot is filled by a token of the chunk, and the one left open by the last chunk."""
    completed: list[int] = []
    for position in range(start, stop):
        if (position + 1) % page_slots == 0 or (is_last and position == stop - 1):
            completed.append(position // page_slots)
    return completed


@st.composite
def handoffs(draw: st.DrawFn) -> tuple[int, int, int, list[int]]:
    """Page size, held tokens, prompt tokens, and where chunks meet: from token 0, or from the end of the held ones."""
    page_slots = draw(st.integers(1, 9))
    num_held = page_slots * draw(st.integers(0, 3))
    num_prompt = num_held + draw(st.integers(2, 40))
    first = draw(st.sampled_from([0, num_held]))
    inner = draw(st.sets(st.integers(first + 1, num_prompt - 2))) if num_prompt - 2 > first else set[int]()
    return page_slots, num_held, num_prompt, [first, *sorted(inner), num_prompt - 1]


@given(st.integers(1, 20), st.integers(0, 100), st.integers(1, 100), st.booleans())
def test_pages_completed_by_a_chunk_equal_a_walk_over_its_tokens(
    page_slots: int, start: int, num_tokens: int, is_last: bool
) -> None:
    stop = start + num_tokens
    completed = pages_completed(start=start, stop=stop, is_last=is_last, page_slots=page_slots)
    assert list(completed) == pages_by_walking(start=start, stop=stop, is_last=is_last, page_slots=page_slots)


@given(st.integers(1, 20), st.integers(0, 100), st.integers(1, 100))
def test_draft_pages_completed_by_a_chunk_have_the_token_after_them_in_it(
    page_slots: int, start: int, num_tokens: int
) -> None:
    stop = start + num_tokens
    completed = draft_pages_completed(start=start, stop=stop, is_last=False, page_slots=page_slots)
    assert list(completed) == [
        (token - 1) // page_slots for token in range(start, stop) if token > 0 and token % page_slots == 0
    ]


@pytest.mark.parametrize("completed_by", [pages_completed, draft_pages_completed])
@given(handoff=handoffs())
def test_pages_over_any_chunk_cuts_are_written_exactly_once(
    completed_by: Callable[..., range], handoff: tuple[int, int, int, list[int]]
) -> None:
    page_slots, num_held, num_prompt, cuts = handoff
    written = [
        position
        for start, stop in pairwise(cuts)
        for position in completed_by(start=start, stop=stop, is_last=stop == num_prompt - 1, page_slots=page_slots)
        if position >= num_held // page_slots
    ]
    wanted = pages_to_write(num_held_tokens=num_held, num_prompt_tokens=num_prompt, page_slots=page_slots)
    assert written == list(wanted)
    assert written == sorted({token // page_slots for token in range(num_held, num_prompt - 1)})


@given(handoff=handoffs(), num_heads=st.integers(1, 12), num_layers=st.integers(1, 4), draw=st.data())
def test_num_writes_counts_each_page_in_each_layer_and_pair_and_the_tail(
    handoff: tuple[int, int, int, list[int]], num_heads: int, num_layers: int, draw: st.DataObject
) -> None:
    page_slots, num_held, num_prompt, _ = handoff
    counts = st.sampled_from(rank_counts(num_heads))
    layout = KvLayout(num_layers=num_layers, num_kv_heads=num_heads, head_dim=1, page_slots=page_slots, dtype="float16")
    source = KvSharding(layout=layout, num_ranks=draw.draw(counts))
    target = KvSharding(layout=layout, num_ranks=draw.draw(counts))
    pages = {token // page_slots for token in range(num_held, num_prompt - 1)}
    pairs = rank_pairs(source, target, handoff_id=HandoffId(draw.draw(st.integers(0, 2**63))))
    writes = list(product(range(num_layers), pages, pairs))
    counted = num_writes(source, target, num_held_tokens=num_held, num_prompt_tokens=num_prompt)
    assert counted == len(writes) + 1
    draft_layout = replace(layout, num_layers=draw.draw(st.integers(1, 4)))
    with_drafter = num_writes(
        source, target, num_held_tokens=num_held, num_prompt_tokens=num_prompt, draft_layout=draft_layout
    )
    assert with_drafter == counted + len(pages) * draft_layout.num_layers


@pytest.mark.parametrize(
    ("num_prompt_tokens", "num_pages"),
    # The last prompt token is not handed over, so a prompt of page + 1 tokens still fits one page.
    [(1, 0), (2, 1), (15, 1), (16, 1), (17, 1), (18, 2), (33, 2), (34, 3)],
)
def test_pages_to_write_at_page_edges_leave_out_the_last_token(num_prompt_tokens: int, num_pages: int) -> None:
    pages = pages_to_write(num_held_tokens=0, num_prompt_tokens=num_prompt_tokens, page_slots=16)
    assert pages == range(num_pages)


@pytest.mark.parametrize(("num_prompt_tokens", "num_pages"), [(33, 0), (34, 1), (49, 1), (50, 2)])
def test_pages_to_write_after_held_tokens_begin_behind_them(num_prompt_tokens: int, num_pages: int) -> None:
    pages = pages_to_write(num_held_tokens=32, num_prompt_tokens=num_prompt_tokens, page_slots=16)
    assert pages == range(2, 2 + num_pages)


def test_pages_completed_by_a_chunk_inside_a_page_are_none() -> None:
    assert not pages_completed(start=3, stop=15, is_last=False, page_slots=16)


def test_pages_completed_by_a_last_chunk_inside_a_page_is_that_page() -> None:
    assert pages_completed(start=17, stop=20, is_last=True, page_slots=16) == range(1, 2)


def test_pages_to_write_after_held_tokens_inside_a_page_is_refused() -> None:
    with pytest.raises(ValueError, match="not a multiple"):
        pages_to_write(num_held_tokens=15, num_prompt_tokens=40, page_slots=16)
