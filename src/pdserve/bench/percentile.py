"""The one definition of a percentile that all benchmarks use."""

from collections.abc import Sequence


def percentile(samples: Sequence[float], percent: float) -> float:
    """The smallest sample that at least `percent` of them do not exceed (nearest rank). Requires: samples."""
    return percentile_of_sorted(sorted(samples), percent)


def percentile_of_sorted(ordered: Sequence[float], percent: float) -> float:
    """As `percentile`, of ascending samples."""
    rank = -(-len(ordered) * percent // 100)
    return ordered[max(0, int(rank) - 1)]
