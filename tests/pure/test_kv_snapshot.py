"""Copies of KV out of the regions of ranks, against regions that are filled byte by byte."""

import mmap
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.pure.shardings import heads_held, sharding

from pdserve.kv.shard import KvSharding
from pdserve.kv.snapshot import KvSnapshot

NUM_PAGES = 7
NUM_LAYERS = 3
SHARDINGS = [(1, 1), (2, 1), (2, 2), (4, 2), (6, 3), (2, 4), (1, 3), (3, 9)]
"""(heads, ranks)."""


def vector(shards: KvSharding, head: int, *, layer_index: int, plane: int, position: int, salt: int = 0) -> bytes:
    """What the cache holds, wherever it lies; `salt` tells replicas apart."""
    draw = random.Random(f"{head} {layer_index} {plane} {position} {salt}")
    return draw.randbytes(shards.layout.slot_bytes)


def filled_regions(
    shards: KvSharding, page_indices: list[int], *, num_tokens: int, replicas_differ: bool
) -> list[mmap.mmap]:
    """`[layer][page][head][plane][slot]` of each rank, with noise where none of the tokens is."""
    layout = shards.rank_layout
    num_heads = shards.layout.num_kv_heads
    regions: list[mmap.mmap] = []
    for rank in range(shards.num_ranks):
        region = mmap.mmap(-1, layout.region_bytes(NUM_PAGES) + 64)
        region[:] = random.Random(rank).randbytes(len(region))
        for layer_index in range(layout.num_layers):
            for place, head in enumerate(heads_held(num_heads, shards.num_ranks, rank)):
                for plane in range(layout.num_planes):
                    for position in range(num_tokens):
                        row = layer_index * NUM_PAGES + page_indices[position // layout.page_slots]
                        row = (row * layout.num_kv_heads + place) * layout.num_planes + plane
                        row = row * layout.page_slots + position % layout.page_slots
                        start = row * layout.slot_bytes
                        region[start : start + layout.slot_bytes] = vector(
                            shards,
                            head,
                            layer_index=layer_index,
                            plane=plane,
                            position=position,
                            salt=rank if replicas_differ else 0,
                        )
        regions.append(region)
    return regions


def expected(shards: KvSharding, heads: list[int], *, num_tokens: int, salts: list[int]) -> bytes:
    """`[layer][head][plane][token]`, with the salt of each head."""
    return b"".join(
        vector(shards, head, layer_index=layer_index, plane=plane, position=position, salt=salt)
        for layer_index in range(NUM_LAYERS)
        for head, salt in zip(heads, salts, strict=True)
        for plane in range(shards.layout.num_planes)
        for position in range(num_tokens)
    )


def take(shards: KvSharding, page_indices: list[int], *, num_tokens: int, replicas_differ: bool = False) -> KvSnapshot:
    return KvSnapshot.take(
        filled_regions(shards, page_indices, num_tokens=num_tokens, replicas_differ=replicas_differ),
        shards,
        num_pages=NUM_PAGES,
        page_indices=tuple(page_indices),
        num_tokens=num_tokens,
    )


@pytest.mark.parametrize("num_planes", [1, 2])
@pytest.mark.parametrize(("num_heads", "num_ranks"), SHARDINGS)
def test_snapshot_of_several_ranks_holds_the_heads_of_each(num_heads: int, num_ranks: int, num_planes: int) -> None:
    shards = sharding(num_heads=num_heads, num_ranks=num_ranks, num_layers=NUM_LAYERS, num_planes=num_planes)
    snapshot = take(shards, [5, 0, 3], num_tokens=5, replicas_differ=True)
    for rank in range(num_ranks):
        heads = heads_held(num_heads, num_ranks, rank)
        wanted = expected(shards, heads, num_tokens=5, salts=[rank] * len(heads))
        assert snapshot.ranks[rank] == snapshot.of_rank(rank).tobytes() == wanted
        assert snapshot.of_rank(rank).shape == (NUM_LAYERS, len(heads), num_planes, 5, shards.layout.slot_bytes)


@pytest.mark.parametrize(("num_heads", "num_ranks"), SHARDINGS)
def test_whole_snapshot_has_all_heads_in_order_from_the_first_rank_that_holds_each(
    num_heads: int, num_ranks: int
) -> None:
    shards = sharding(num_heads=num_heads, num_ranks=num_ranks, num_layers=NUM_LAYERS)
    first_ranks = [
        min(rank for rank in range(num_ranks) if head in heads_held(num_heads, num_ranks, rank))
        for head in range(num_heads)
    ]
    whole = take(shards, [6, 2], num_tokens=4, replicas_differ=True).whole()
    assert whole.tobytes() == expected(shards, list(range(num_heads)), num_tokens=4, salts=first_ranks)


@given(
    pages=st.permutations(range(NUM_PAGES)),
    num_tokens=st.integers(0, 2 * NUM_PAGES),
    num_ranks=st.sampled_from([1, 2, 4]),
)
def test_whole_snapshot_does_not_depend_on_pages_and_ranks(pages: list[int], num_tokens: int, num_ranks: int) -> None:
    one = sharding(num_heads=2, num_ranks=1, num_layers=2)
    other = sharding(num_heads=2, num_ranks=num_ranks, num_layers=2)
    in_order = take(one, list(range(NUM_PAGES)), num_tokens=num_tokens).whole()
    assert np.array_equal(take(other, pages, num_tokens=num_tokens).whole(), in_order)


def test_snapshot_ignores_pages_behind_its_tokens() -> None:
    """A sequence may hold more pages than its prompt fills."""
    shards = sharding(num_heads=2, num_ranks=2, num_layers=NUM_LAYERS)
    long = take(shards, [4, 1, 6, 0], num_tokens=3)
    assert long.ranks == take(shards, [4, 1], num_tokens=3).ranks
