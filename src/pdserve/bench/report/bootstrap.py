"""Confidence intervals by resampling what is independent: whole requests, or whole repetitions, never single tokens."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt

from pdserve.percentile import nearest_rank

NUM_RESAMPLES = 2000
CONFIDENCE = 0.95
SEED = 20_240_601
"""Fixed, so that the same files give the same table."""

Counts = npt.NDArray[np.int64]
"""How often each member was drawn in one resample."""


class Effect(Enum):
    """How what changed is told."""

    RATIO = "ratio"
    DIFFERENCE = "difference"
    """For shares, which may be 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    low: float
    high: float

    def told(self, effect: Effect) -> str:
        match effect:
            case Effect.RATIO:
                return f"{self.low:.3f} to {self.high:.3f}"
            case Effect.DIFFERENCE:
                return f"{100 * self.low:+.1f} to {100 * self.high:+.1f} pp"


class Samples:
    """Values, each of one member of a population, of which a resample takes some members several times."""

    def __init__(self, values_by_member: Sequence[Sequence[float]]) -> None:
        members = np.repeat(np.arange(len(values_by_member)), [len(values) for values in values_by_member])
        values = np.fromiter((value for values in values_by_member for value in values), dtype=np.float64)
        order = np.argsort(values, kind="stable")
        self._values, self._members = values[order], members[order]

    def __len__(self) -> int:
        return len(self._values)

    def percentiles(self, percents: Sequence[float], counts: Counts) -> list[float]:
        """By nearest rank, with each value as often as its member was drawn; NaN where none was."""
        cumulative = np.cumsum(counts[self._members]) if len(self._values) else np.zeros(1, dtype=np.int64)
        num_drawn = int(cumulative[-1])
        if num_drawn == 0:
            return [float("nan")] * len(percents)
        ranks = [nearest_rank(num_drawn, percent) for percent in percents]
        return [float(self._values[index]) for index in np.searchsorted(cumulative, ranks)]


def intervals(num_members: int, statistics: Callable[[Counts], Sequence[float]]) -> list[Interval]:
    """Of each statistic, the middle `CONFIDENCE` of its values over the resamples; NaN where it never had one.

    Requires: `num_members >= 1`, and as many statistics at each call.
    """
    draw = np.random.default_rng(SEED)
    found = np.array(
        [
            statistics(np.bincount(draw.integers(num_members, size=num_members), minlength=num_members))
            for _ in range(NUM_RESAMPLES)
        ]
    )
    tail = 100 * (1 - CONFIDENCE) / 2
    return [_middle(column[np.isfinite(column)], tail=tail) for column in found.T]


def _middle(values: npt.NDArray[np.float64], *, tail: float) -> Interval:
    if not len(values):
        return Interval(low=float("nan"), high=float("nan"))
    low, high = np.percentile(values, [tail, 100 - tail])
    return Interval(low=float(low), high=float(high))
