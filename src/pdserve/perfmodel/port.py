"""What a performance model answers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class PassShape:
    """What one forward pass of one rank computes, as far as its time depends on it."""

    num_prefill_tokens: int = 0
    """Of prompt chunks."""
    num_prefill_keys: int = 0
    """Over those tokens, the number of keys that each attends to, summed: a chunk [start, stop) has
    (start + stop + 1) * (stop - start) / 2."""
    num_decode_tokens: int = 0
    """Of sequences that generate: one each, and one more a guess."""
    num_decode_keys: int = 0
    """Over those tokens, as above."""


class PerfModel(Protocol):
    """Of one worker's rank: a model, its sharding and its hardware."""

    @property
    def provenance(self) -> str:
        """Where the numbers come from: script, date and machine, or package and version."""
        ...

    @property
    def deviations(self) -> Sequence[float]:
        """What single passes took of an undisturbed one, in the order they were measured: slow ones come together.
        Empty where nobody measured it."""
        ...

    def pass_s(self, shape: PassShape) -> float:
        """How long a pass takes that nobody disturbs, its sampling included. Cost: a few microseconds."""
        ...

    def push_s(self, num_bytes: int) -> float:
        """How long a link takes for these bytes when nothing else is on it, start to landing."""
        ...
