"""How long requests are, as far as a histogram tells: how many lie in each of its buckets."""

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Bucket:
    """Lengths from `least` to `most`, both included."""

    least: int
    most: int
    count: float

    @property
    def middle(self) -> float:
        return (self.least + self.most) / 2

    @property
    def variance_within(self) -> float:
        """Of lengths of which each in the bucket is as likely."""
        return ((self.most - self.least + 1) ** 2 - 1) / 12


def buckets_between(before: Mapping[float, float], after: Mapping[float, float]) -> tuple[Bucket, ...]:
    """Those in which a histogram gained something, ascending.

    Requires: of both, upper bounds of 1 and more, to the number of all lengths that were not longer.
    """
    found: list[Bucket] = []
    low, below = 0, 0.0
    for bound in sorted(after):
        not_longer = after[bound] - before.get(bound, 0.0)
        high = low + 1 if math.isinf(bound) else int(bound)
        if not_longer > below:
            found.append(Bucket(low + 1, high, not_longer - below))
        low, below = high, not_longer
    return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenLengths:
    mean: float
    """Not that of the buckets, which is off by up to half their widths."""
    buckets: tuple[Bucket, ...]
    """At least one."""

    @property
    def cv(self) -> float:
        """Standard deviation over mean, less what the buckets' widths add to it (Sheppard's correction)."""
        middle = self._middle
        squares = sum(each.count * ((each.middle - middle) ** 2 - each.variance_within) for each in self.buckets)
        return math.sqrt(max(0.0, squares / self._num_lengths)) / middle

    def draw(self, source: random.Random, num_lengths: int) -> list[int]:
        """At random from the buckets, each length within one as likely; stretched or shrunk to the mean."""
        stretch = self.mean / self._middle
        weights = [each.count for each in self.buckets]
        drawn = source.choices(self.buckets, weights, k=num_lengths)
        return [max(1, round(stretch * source.randint(each.least, each.most))) for each in drawn]

    @property
    def _num_lengths(self) -> float:
        return sum(each.count for each in self.buckets)

    @property
    def _middle(self) -> float:
        """The mean of lengths that lie in the middles of their buckets."""
        return sum(each.count * each.middle for each in self.buckets) / self._num_lengths
