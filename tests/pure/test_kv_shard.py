"""Which rank holds which KV heads, against their definition as overlapping cuts of the same length."""

import msgspec
import pytest
from hypothesis import given
from tests.pure.shardings import MAX_SMALL_HEADS, heads_held, large_pairs, rank_counts, sharding

from pdserve.errors import ConfigError
from pdserve.kv.shard import KvSharding

SMALL = [(heads, ranks) for heads in range(1, MAX_SMALL_HEADS + 1) for ranks in rank_counts(heads)]


def require_heads_as_defined(shards: KvSharding) -> None:
    """Every rank's heads, the replica sets and each rank's layout agree with the definition."""
    num_heads, num_ranks = shards.layout.num_kv_heads, shards.num_ranks
    held = [heads_held(num_heads, num_ranks, rank) for rank in range(num_ranks)]
    assert [list(shards.heads_of(rank)) for rank in range(num_ranks)] == held
    assert {len(heads) for heads in held} == {shards.heads_per_rank} == {shards.rank_layout.num_kv_heads}
    sets = [shards.ranks_of_set(index) for index in range(shards.num_replica_sets)]
    assert [rank for ranks in sets for rank in ranks] == list(range(num_ranks))
    assert {len(ranks) for ranks in sets} == {shards.num_replicas}
    for index, ranks in enumerate(sets):
        same = [rank for rank in range(num_ranks) if held[rank] == list(shards.heads_of_set(index))]
        assert list(ranks) == same
    assert [head for index in range(len(sets)) for head in shards.heads_of_set(index)] == list(range(num_heads))


@pytest.mark.parametrize(("num_heads", "num_ranks"), SMALL)
def test_sharding_of_few_heads_holds_what_the_definition_says(num_heads: int, num_ranks: int) -> None:
    require_heads_as_defined(sharding(num_heads=num_heads, num_ranks=num_ranks))


@given(large_pairs())
def test_sharding_of_many_heads_holds_what_the_definition_says(case: tuple[int, int, int]) -> None:
    num_heads, num_ranks, _ = case
    require_heads_as_defined(sharding(num_heads=num_heads, num_ranks=num_ranks))


def test_sharding_of_mla_is_one_replica_set_of_whole_latents() -> None:
    shards = sharding(num_heads=1, num_ranks=8, num_planes=1)
    assert (shards.num_replica_sets, shards.num_replicas) == (1, 8)
    assert shards.rank_layout == shards.layout


def test_sharding_of_a_rank_differs_from_the_whole_in_heads_alone() -> None:
    shards = sharding(num_heads=6, num_ranks=3, num_layers=5)
    assert msgspec.structs.replace(shards.rank_layout, num_kv_heads=6) == shards.layout
    assert shards.rank_layout.page_bytes * 3 == shards.layout.page_bytes


def test_sharding_is_valid_exactly_when_heads_and_ranks_divide() -> None:
    for num_heads in range(1, 13):
        valid = [n for n in range(1, 37) if sharding(num_heads=num_heads, num_ranks=n).problem is None]
        assert valid == [n for n in range(1, 37) if num_heads % n == 0 or n % num_heads == 0]


@pytest.mark.parametrize(
    ("num_heads", "num_ranks"), [(3, 2), (9, 6), (2, 3), (4, 6), (3, 0), (3, -3), (0, 1), (0, 2), (-4, 2)]
)
def test_sharding_that_does_not_divide_is_refused_with_both_numbers(num_heads: int, num_ranks: int) -> None:
    shards = sharding(num_heads=num_heads, num_ranks=num_ranks)
    with pytest.raises(ConfigError, match=f"tensor parallel size {num_ranks} .* {num_heads} KV heads"):
        shards.require_valid()


def test_sharding_that_divides_is_accepted() -> None:
    sharding(num_heads=3, num_ranks=9).require_valid()
