"""How long the passes of one rank take, one after another."""

import random
from collections.abc import Iterator, Sequence
from itertools import cycle, islice, repeat

from pdserve.ids import Incarnation
from pdserve.perfmodel.port import PassShape, PerfModel
from pdserve.simulate.fleet.plan import FleetPlan


class PassTimes:
    """What the performance model says, times how passes deviated from it when they were measured.

    The deviations follow each other as they did then: a neighbour on the host disturbs several passes in a row, and a
    request that meets one slow pass is likely to meet more.
    """

    def __init__(self, plan: FleetPlan, perf: PerfModel, incarnation: Incarnation, dp_rank: int) -> None:
        self._drafting = plan.drafting
        self._num_layers = plan.layout.num_layers
        self._perf = perf
        self._deviations = _replay(perf.deviations, random.Random(f"{plan.seed}/{incarnation}/{dp_rank}"))

    def next_s(self, shape: PassShape) -> float:
        return self._drafting.pass_s(self._perf, shape, num_layers=self._num_layers) * next(self._deviations)


def _replay(deviations: Sequence[float], draw: random.Random) -> Iterator[float]:
    """For ever, from a place of its own on."""
    if not deviations:
        return repeat(1.0)
    return islice(cycle(deviations), draw.randrange(len(deviations)), None)
