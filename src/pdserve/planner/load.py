"""The requests that a fleet is planned for, with what the estimates need to know of them."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.percentile import percentile_of_sorted
from pdserve.workload.request import WorkloadRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedLoad:
    """Made by `of`, so that the figures are those of the requests."""

    requests: tuple[WorkloadRequest, ...]
    """By arrival; all of them are simulated on each fleet."""
    rate_per_s: float
    num_prompt_tokens: int
    """The mean, as of all figures that do not say otherwise."""
    num_output_tokens: int
    num_prefix_tokens: int
    """Of a prompt, that an earlier one has left in a prefix cache."""
    prompt_cv: float
    """Standard deviation of the prompts' lengths over their mean; 0: all alike."""
    prompt_lengths: tuple[int, ...]
    """Ascending."""
    most_tokens: int
    """Prompt and output of the request that has most of both together."""

    @classmethod
    def of(cls, requests: Sequence[WorkloadRequest], *, rate_per_s: float, num_prefix_tokens: int = 0) -> "PlannedLoad":
        """Requires: at least one request; `rate_per_s` > 0."""
        lengths = sorted(request.num_prompt_tokens for request in requests)
        mean = statistics.fmean(lengths)
        return cls(
            requests=tuple(requests),
            rate_per_s=rate_per_s,
            num_prompt_tokens=round(mean),
            num_output_tokens=round(statistics.fmean(request.num_output_tokens for request in requests)),
            num_prefix_tokens=num_prefix_tokens,
            prompt_cv=statistics.pstdev(lengths) / mean,
            prompt_lengths=tuple(lengths),
            most_tokens=max(request.num_prompt_tokens + request.num_output_tokens for request in requests),
        )

    @property
    def is_uniform(self) -> bool:
        return self.most_tokens == self.num_prompt_tokens + self.num_output_tokens

    def prompt_tokens_within(self, share: float) -> int:
        """The length that so large a share of the prompts does not exceed. Requires: 0 < `share` <= 1."""
        return int(percentile_of_sorted(self.prompt_lengths, 100 * share))

    def __str__(self) -> str:
        lengths = f"{self.num_prompt_tokens} + {self.num_output_tokens} tokens"
        return f"{self.rate_per_s:g} requests/s of {lengths}" + ("" if self.is_uniform else " on average")
