"""Scaled and stretched loads: what prompts share stays shared."""

from hypothesis import given
from hypothesis import strategies as st

from pdserve.workload.request import WorkloadRequest
from pdserve.workload.scaling import with_scaled_lengths, with_stretched_time

BLOCK_TOKENS = 512


@st.composite
def requests(draw: st.DrawFn) -> WorkloadRequest:
    blocks = draw(st.lists(st.integers(0, 20), max_size=6))
    own = draw(st.integers(0 if blocks else 1, BLOCK_TOKENS - 1))
    return WorkloadRequest(
        arrival_s=draw(st.floats(0, 1e6)),
        num_prompt_tokens=len(blocks) * BLOCK_TOKENS + own,
        num_output_tokens=draw(st.integers(1, 1000)),
        prefix_blocks=tuple(blocks),
        block_tokens=BLOCK_TOKENS if blocks else 0,
    )


@given(st.lists(requests(), max_size=8), st.floats(0.001, 8))
def test_scaled_requests_keep_their_blocks_and_their_bounds(load: list[WorkloadRequest], factor: float) -> None:
    scaled = with_scaled_lengths(load, factor)
    assert [request.prefix_blocks for request in scaled] == [request.prefix_blocks for request in load]
    assert [request.arrival_s for request in scaled] == [request.arrival_s for request in load]
    assert len({request.block_tokens for request in scaled if request.prefix_blocks}) <= 1
    for request, original in zip(scaled, load, strict=True):
        assert request.num_output_tokens >= 1
        assert request.num_prompt_tokens >= max(1, len(request.prefix_blocks) * request.block_tokens)
        num_pieces = len(request.prefix_blocks) + 1
        assert abs(request.num_prompt_tokens - factor * original.num_prompt_tokens) <= num_pieces


@given(st.lists(requests(), max_size=8))
def test_requests_scaled_by_one_stay_as_they_are(load: list[WorkloadRequest]) -> None:
    assert with_scaled_lengths(load, 1.0) == load
    assert with_stretched_time(load, 1.0) == load


def test_stretched_requests_come_later_and_stay_as_long() -> None:
    request = WorkloadRequest(arrival_s=3.0, num_prompt_tokens=5, num_output_tokens=6)
    (stretched,) = with_stretched_time([request], 2.5)
    assert stretched == WorkloadRequest(arrival_s=7.5, num_prompt_tokens=5, num_output_tokens=6)
