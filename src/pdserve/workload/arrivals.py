"""When requests come: renewal processes whose gaps are Gamma distributed, Poisson among them."""

import itertools
import random

LEAST_CV = 1e-3
"""What is under it counts as 0: gaps that vary by less are a steady beat to any server."""
MOST_CV = 100.0
"""Where nearly all gaps are 0, and one in 10,000 makes up for them."""


def arrivals_s(*, num_requests: int, rate_per_s: float, cv: float, seed: int) -> list[float]:
    """Ascending instants since the start, the first one a gap after it.

    `cv` is the coefficient of variation of the gaps: 0 a steady beat, 1 a Poisson process, more comes in bursts. The
    same seed gives the same arrivals at every rate, drawn out or pushed together.

    Requires: `rate_per_s > 0`, `0 <= cv <= MOST_CV`.
    """
    gaps = _unit_gaps(num_requests, cv, random.Random(seed))
    return [instant / rate_per_s for instant in itertools.accumulate(gaps)]


def _unit_gaps(num_gaps: int, cv: float, source: random.Random) -> list[float]:
    """Gaps of mean 1: a Gamma distribution of shape 1/cv² and scale cv²."""
    if cv < LEAST_CV:
        return [1.0] * num_gaps
    variance = cv * cv
    return [source.gammavariate(1 / variance, variance) for _ in range(num_gaps)]
