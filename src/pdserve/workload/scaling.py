"""A load made shorter, longer, denser or sparser, with the prefixes that its prompts share still shared."""

from collections.abc import Iterable
from dataclasses import replace

from pdserve.workload.request import WorkloadRequest


def with_scaled_lengths(requests: Iterable[WorkloadRequest], factor: float) -> list[WorkloadRequest]:
    """Prompts and outputs times `factor`, each of one token at least.

    The size of the blocks is scaled and their names stay, so prompts share as many blocks as before. A prompt is at
    least as long as its blocks, which round alike in all prompts. Requires: `factor > 0`.
    """
    return [_scaled(request, factor) for request in requests]


def with_stretched_time(requests: Iterable[WorkloadRequest], factor: float) -> list[WorkloadRequest]:
    """Arrivals times `factor`: 2 halves the rate. Requires: `factor > 0`."""
    return [replace(request, arrival_s=request.arrival_s * factor) for request in requests]


def _scaled(request: WorkloadRequest, factor: float) -> WorkloadRequest:
    num_blocks = len(request.prefix_blocks)
    block_tokens = max(1, round(request.block_tokens * factor)) if num_blocks else 0
    num_own_tokens = request.num_prompt_tokens - num_blocks * request.block_tokens
    return replace(
        request,
        num_prompt_tokens=max(1, num_blocks * block_tokens + round(num_own_tokens * factor)),
        num_output_tokens=max(1, round(request.num_output_tokens * factor)),
        block_tokens=block_tokens,
    )
