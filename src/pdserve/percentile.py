"""The one definition of a percentile: nearest rank, so that each is the figure of one sample."""

from collections.abc import Sequence


def percentile(samples: Sequence[float], percent: float) -> float:
    """The smallest sample that at least `percent` of them do not exceed. Requires: samples."""
    return percentile_of_sorted(sorted(samples), percent)


def percentile_of_sorted(ordered: Sequence[float], percent: float) -> float:
    """As `percentile`, of ascending samples."""
    return ordered[nearest_rank(len(ordered), percent) - 1]


def nearest_rank(num_samples: int, percent: float) -> int:
    """Which of so many ascending samples the percentile is, from 1. Requires: a sample; `percent` from 0 to 100."""
    return max(1, int(-(-num_samples * percent // 100)))
