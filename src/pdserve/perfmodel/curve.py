"""A function of one count, given at some points and straight between them."""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise

import msgspec

from pdserve.errors import ConfigError


class Curve(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Before the first point and behind the last one, the nearest piece goes on; one point is a constant.

    Ensures: at least one point; the counts rise; no value is negative and none is less than the one before it.
    Raises: `ConfigError` on construction and decoding when they do not.
    """

    counts: tuple[int, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.counts or len(self.counts) != len(self.seconds):
            raise ConfigError("a curve has as many seconds as counts, and at least one of each")
        if not _rises(self.counts, strictly=True) or not _rises(self.seconds, strictly=False):
            raise ConfigError("a curve's counts rise, and its seconds never fall")
        if self.seconds[0] < 0 or not self.seconds[-1] < float("inf"):
            raise ConfigError("a curve's seconds are finite and not negative")

    def __call__(self, count: int) -> float:
        """Ensures: not negative. Cost: one bisection."""
        counts, seconds = self.counts, self.seconds
        if len(counts) == 1:
            return seconds[0]
        right = min(max(bisect_right(counts, count), 1), len(counts) - 1)
        slope = (seconds[right] - seconds[right - 1]) / (counts[right] - counts[right - 1])
        return max(0.0, seconds[right - 1] + slope * (count - counts[right - 1]))


def _rises(values: Sequence[float], *, strictly: bool) -> bool:
    return all(low < high if strictly else low <= high for low, high in pairwise(values))
