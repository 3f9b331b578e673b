"""Shardings for tests, and which heads a rank holds, by definition and not by arithmetic."""

from hypothesis import strategies as st

from pdserve.kv.layout import KvLayout
from pdserve.kv.shard import KvSharding

MAX_SMALL_HEADS = 12


def sharding(*, num_heads: int, num_ranks: int, num_layers: int = 1, num_planes: int = 2) -> KvSharding:
    """Of pages so small that every byte can be looked at: 2 slots of 2 bytes a head and plane."""
    layout = KvLayout(
        num_layers=num_layers,
        num_kv_heads=num_heads,
        head_dim=1,
        page_slots=2,
        dtype="bfloat16",
        num_planes=num_planes,
    )
    return KvSharding(layout=layout, num_ranks=num_ranks)


def rank_counts(num_heads: int, *, max_replicas: int = 3) -> list[int]:
    """Every number of ranks that `num_heads` can be spread over, up to replica sets of `max_replicas`."""
    return [n for n in range(1, num_heads * max_replicas + 1) if num_heads % n == 0 or n % num_heads == 0]


def heads_held(num_heads: int, num_ranks: int, rank: int) -> list[int]:
    """Ranks and heads are cut from the same unit length, in order: a rank holds the heads that it overlaps."""
    return [
        head
        for head in range(num_heads)
        if max(head * num_ranks, rank * num_heads) < min((head + 1) * num_ranks, (rank + 1) * num_heads)
    ]


SMALL_PAIRS = [
    (num_heads, num_sources, num_targets)
    for num_heads in range(1, MAX_SMALL_HEADS + 1)
    for num_sources in rank_counts(num_heads)
    for num_targets in rank_counts(num_heads)
]
"""(heads, source ranks, destination ranks): all small ones."""


@st.composite
def large_pairs(draw: st.DrawFn) -> tuple[int, int, int]:
    """(heads, source ranks, destination ranks), beyond `SMALL_PAIRS`."""
    num_heads = draw(st.integers(1, 128))
    counts = st.one_of(
        st.sampled_from(rank_counts(num_heads, max_replicas=1)), st.integers(2, 8).map(lambda r: r * num_heads)
    )
    return num_heads, draw(counts), draw(counts)
