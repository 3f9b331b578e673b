"""Prompts of a workload share what their blocks share."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from pdserve.bench.load.prompts import Prompts
from pdserve.workload.request import WorkloadRequest
from pdserve.workload.scaling import with_scaled_lengths

TOKEN_IDS = tuple(range(100, 1100))


def request(blocks: tuple[int, ...], *, num_own_tokens: int, block_tokens: int = 16) -> WorkloadRequest:
    return WorkloadRequest(
        arrival_s=0.0,
        num_prompt_tokens=len(blocks) * block_tokens + num_own_tokens,
        num_output_tokens=1,
        prefix_blocks=blocks,
        block_tokens=block_tokens if blocks else 0,
    )


def num_shared(one: Sequence[int], other: Sequence[int]) -> int:
    """How many elements the two begin with in common."""
    differing = (index for index, (left, right) in enumerate(zip(one, other, strict=False)) if left != right)
    return next(differing, min(len(one), len(other)))


block_lists = st.lists(st.integers(0, 3), max_size=5).map(tuple)


@given(block_lists, block_lists, st.integers(8, 40), st.floats(0.2, 3), st.integers(0, 2**32))
def test_prompts_share_as_many_tokens_as_their_first_blocks_have(
    one: tuple[int, ...], other: tuple[int, ...], num_own_tokens: int, factor: float, seed: int
) -> None:
    load = [request(blocks, num_own_tokens=num_own_tokens) for blocks in (one, other)]
    prompts = Prompts(TOKEN_IDS, seed=seed)
    for requests in (load, with_scaled_lengths(load, factor)):
        first, second = (prompts.prompt(index, each) for index, each in enumerate(requests))
        assert [len(first), len(second)] == [each.num_prompt_tokens for each in requests]
        num_blocks = num_shared(one, other)
        block_tokens = max(each.block_tokens for each in requests)
        # A token drawn by chance in both prompts makes them alike for a little longer, one time in a thousand.
        assert 0 <= num_shared(first, second) - num_blocks * block_tokens <= 2
        assert set(first) | set(second) <= set(TOKEN_IDS)


def test_prompts_of_one_seed_repeat_and_of_another_differ() -> None:
    load = request((1, 2), num_own_tokens=9)
    assert Prompts(TOKEN_IDS, seed=4).prompt(3, load) == Prompts(TOKEN_IDS, seed=4).prompt(3, load)
    assert num_shared(Prompts(TOKEN_IDS, seed=4).prompt(3, load), Prompts(TOKEN_IDS, seed=5).prompt(3, load)) < 3


def test_prompts_without_blocks_share_nothing() -> None:
    load = request((), num_own_tokens=64)
    prompts = Prompts(TOKEN_IDS, seed=0)
    assert num_shared(prompts.prompt(0, load), prompts.prompt(1, load)) < 3
