"""In which order the runs of the experiment come."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.bench.experiment.points import Arm, Point

ORDER_SEED = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    point: Point
    seed: int
    """Of the arrivals. A block is one point and one seed: its runs, an arm each, follow each other."""
    arm: Arm


def planned_runs(points: Sequence[Point], *, num_seeds: int) -> list[Run]:
    """All runs, seed by seed, so that an interrupted experiment has compared every point equally often.

    The points of a seed, and the arms of a block, come in random order: what drifts on the machine then favours nobody.
    The same call gives the same order.
    """
    draw = random.Random(ORDER_SEED)
    runs: list[Run] = []
    for seed in range(num_seeds):
        for point in draw.sample(list(points), len(points)):
            runs += [Run(point=point, seed=seed, arm=arm) for arm in draw.sample(list(Arm), len(Arm))]
    return runs
