"""One request of a workload, without its text."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadRequest:
    """Requires: both counts are positive; the blocks together are no longer than the prompt."""

    arrival_s: float
    """Since the workload's start."""
    num_prompt_tokens: int
    num_output_tokens: int
    prefix_blocks: tuple[int, ...] = ()
    """Names of the prompt's first blocks: two prompts whose lists begin alike begin with the same tokens."""
    block_tokens: int = 0
    """Of each of `prefix_blocks`; 0 where there are none."""
