"""From a goal to the smallest fleet that meets it, as the fleet simulation finds out."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pdserve.config.role import Role
from pdserve.percentile import percentile
from pdserve.planner.candidate import Candidate
from pdserve.planner.goal import Goal
from pdserve.planner.options import Family, families
from pdserve.simulate.fleet.result import FleetResult
from pdserve.simulate.fleet.simulation import simulate_fleet

SETTLING_SHARE = 0.2
"""Of the requests, the first ones, which find an emptier fleet than those after them and do not count."""
SECONDS_PER_HOUR = 3600


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the simulation found of a fleet. Percentiles are of the answered requests."""

    candidate: Candidate
    attainment: float
    ttft_s_p50: float
    ttft_s_p90: float
    tpot_s_p50: float
    tpot_s_p90: float
    utilisation: dict[Role, float]

    def meets(self, goal: Goal) -> bool:
        return self.attainment >= goal.attainment

    def goodput_per_accelerator(self, goal: Goal) -> float:
        """Requests a second that keep within the targets."""
        return self.attainment * goal.workload.rate_per_s / self.candidate.num_accelerators

    def cost_per_million_tokens(self, goal: Goal, *, accelerator_hour_cost: float) -> float:
        """Of output, of requests that keep within the targets."""
        tokens_per_hour = (
            self.attainment * goal.workload.rate_per_s * goal.workload.num_output_tokens * SECONDS_PER_HOUR
        )
        return 1e6 * accelerator_hour_cost * self.candidate.num_accelerators / tokens_per_hour

    @property
    def busiest(self) -> Role:
        """The pool that saturates first when the rate rises."""
        return max(self.utilisation, key=lambda role: self.utilisation[role])


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Of each kind, the fewest accelerators that meet the goal, or else what comes closest; None: nothing to try."""

    goal: Goal
    disaggregated: Verdict | None
    colocated: Verdict | None
    simulated: tuple[Verdict, ...]
    """In the order in which they were."""

    @property
    def best(self) -> Verdict:
        """That meets the goal with the fewest accelerators; where none does, the one that comes closest."""
        verdicts = [each for each in (self.disaggregated, self.colocated) if each is not None]
        return min(verdicts, key=lambda each: _rank(self.goal, each))


Simulate = Callable[[Goal, Candidate], Verdict]


def search(goal: Goal, simulate: Simulate, *, on_run: Callable[[str], None]) -> Plan:
    """Raises: as `families`."""
    verdicts: list[Verdict] = []

    def judge(candidate: Candidate) -> Verdict:
        on_run(f"simulating {candidate}: {candidate.num_accelerators} {goal.hardware.name}")
        verdicts.append(simulate(goal, candidate))
        return verdicts[-1]

    best = [search_kind(goal, kind, judge) for kind in kinds(goal)]
    return Plan(goal=goal, disaggregated=best[0], colocated=best[1], simulated=tuple(verdicts))


def kinds(goal: Goal) -> tuple[Sequence[Family], Sequence[Family]]:
    """Families apart, and colocated ones. Raises: as `families`."""
    found = families(goal)
    return [each for each in found if not each.is_colocated], [each for each in found if each.is_colocated]


def search_kind(goal: Goal, kind: Sequence[Family], judge: Callable[[Candidate], Verdict]) -> Verdict | None:
    """The best over some families. One that is not smaller than what was found already is not simulated."""
    best: Verdict | None = None
    for family in kind:
        most_accelerators = goal.max_accelerators
        if best is not None and best.meets(goal):
            most_accelerators = best.candidate.num_accelerators - 1
        for verdict in _bisect(goal, family, family.most_within(most_accelerators), judge):
            if best is None or _rank(goal, verdict) < _rank(goal, best):
                best = verdict
    return best


def _bisect(goal: Goal, family: Family, most: int, judge: Callable[[Candidate], Verdict]) -> list[Verdict]:
    """All that were simulated on the way to the family's smallest that meets the goal, as more workers never do worse.

    Begins at the estimate, which is mostly near.
    """
    verdicts: list[Verdict] = []
    low, high, next_try = family.least, most, min(family.varied.num_workers, most)
    while low <= high:
        verdicts.append(judge(family.member(next_try)))
        if verdicts[-1].meets(goal):
            high = next_try - 1
        else:
            low = next_try + 1
        next_try = (low + high) // 2
    return verdicts


def simulated(goal: Goal, candidate: Candidate) -> Verdict:
    """What the goal's requests find in this fleet."""
    result = simulate_fleet(candidate.fleet_plan(goal.drafting), goal.workload.requests, candidate.models(goal))
    return verdict_of(goal, candidate, result)


def verdict_of(goal: Goal, candidate: Candidate, result: FleetResult) -> Verdict:
    settled = slice(int(SETTLING_SHARE * result.num_requests), None)
    answered = result.is_answered[settled]
    ttft_s, tpot_s = result.ttft_s[settled], result.tpot_s[settled]
    met = answered & (ttft_s <= goal.ttft_s) & (np.isnan(tpot_s) | (tpot_s <= goal.tpot_s))
    return Verdict(
        candidate=candidate,
        attainment=float(met.mean()) if len(met) else 0.0,
        ttft_s_p50=_percentile(ttft_s, 50),
        ttft_s_p90=_percentile(ttft_s, 90),
        tpot_s_p50=_percentile(tpot_s, 50),
        tpot_s_p90=_percentile(tpot_s, 90),
        utilisation=result.utilisation,
    )


def _rank(goal: Goal, verdict: Verdict) -> tuple[bool, float, int]:
    """What meets the goal comes first, by accelerators; then the rest, by attainment."""
    is_met = verdict.meets(goal)
    return (not is_met, 0.0 if is_met else -verdict.attainment, verdict.candidate.num_accelerators)


def _percentile(values: NDArray[np.float64], percent: int) -> float:
    known = values[~np.isnan(values)]
    return percentile(known.tolist(), percent) if len(known) else float("nan")
