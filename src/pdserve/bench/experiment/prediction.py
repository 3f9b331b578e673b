"""What the fleet simulator says of the experiment's runs, beside what came out.

Each run that counts is simulated with its own arrivals; the requests of all runs of a point and an arm are taken
together, as one distribution of each figure.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from pdserve.bench.experiment.book import Book, RunRecord
from pdserve.bench.experiment.points import MAX_RUNNING, Arm, Point, Slo
from pdserve.config.role import Role
from pdserve.perfmodel.port import PerfModel
from pdserve.simulate.fleet.plan import FleetPlan, PoolPlan
from pdserve.simulate.fleet.result import FleetResult
from pdserve.simulate.fleet.simulation import simulate_fleet
from pdserve.simulate.fleet.validation import (
    ATTAINMENT_TOLERANCE,
    TOLERANCES,
    Comparison,
    compare_attainment,
    compare_percentiles,
)

FIGURES = ("ttft_s", "tpot_s", "worst_gap_s")
ORDERED = (*(f"{figure} p50" for figure in FIGURES), "attainment")
"""The figures by which the arms of a point are put in order."""

TIE_SHARE = dict(TOLERANCES)[50]
"""Arms whose medians are nearer to each other than this are in no order: the simulator need not be nearer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    point: Point
    arm: Arm
    num_runs: int
    comparisons: tuple[Comparison, ...]


def predictions(book: Book, points: Sequence[Point], perf: PerfModel) -> list[Prediction]:
    """For each point and arm with runs that count. Takes about a second for a minute of load."""
    found: list[Prediction] = []
    counted = book.counted
    for point in points:
        for arm in Arm:
            records = [record for run, record in counted.items() if (run.point, run.arm) == (point, arm)]
            if records:
                prefill_s = book.reference.prefill_s[point.num_prompt_tokens]
                results = [_simulated(record, perf, prefill_s=prefill_s) for record in records]
                comparisons = (
                    *compare_percentiles(_felt_figures(records), _simulated_figures(results)),
                    _compared_attainment(book.slo, prefill_s, records, results),
                )
                found.append(Prediction(point=point, arm=arm, num_runs=len(records), comparisons=comparisons))
    return found


def misordered(found: Sequence[Prediction]) -> list[str]:
    """Where the simulator puts two arms of a point the other way round than they came out; a line each."""
    lines: list[str] = []
    for one, other in combinations(found, 2):
        if one.point != other.point:
            continue
        figures = {comparison.figure: comparison for comparison in other.comparisons}
        for comparison in one.comparisons:
            if comparison.figure in ORDERED and _is_misordered(comparison, figures[comparison.figure]):
                lines.append(f"{one.point.name}: {comparison.figure} of {one.arm.value} against {other.arm.value}")
    return lines


def is_right(found: Sequence[Prediction]) -> bool:
    """Whether every figure is near and nothing is misordered."""
    return all(comparison.is_near for prediction in found for comparison in prediction.comparisons) and not misordered(
        found
    )


def prediction_table(found: Sequence[Prediction]) -> str:
    """For people: a section for each point and arm, then the verdicts."""
    lines: list[str] = []
    for prediction in found:
        lines.append(f"{prediction.point.name}, {prediction.arm.value}: {prediction.num_runs} runs")
        lines += [f"  {comparison}" for comparison in prediction.comparisons]
    comparisons = [comparison for prediction in found for comparison in prediction.comparisons]
    wrong = misordered(found)
    lines += [f"the other way round: {line}" for line in wrong]
    num_near = sum(comparison.is_near for comparison in comparisons)
    verdict = "ok" if is_right(found) else "failed"
    lines.append(f"prediction: {verdict} near={num_near} of={len(comparisons)} misordered={len(wrong)}")
    return "\n".join(lines)


def _simulated(record: RunRecord, perf: PerfModel, *, prefill_s: float) -> FleetResult:
    workload = record.point.workload(prefill_s=prefill_s, seed=record.seed)
    return simulate_fleet(
        fleet_plan(record.arm, seed=record.seed), workload.requests(len(record.felt)), dict.fromkeys(Role, perf)
    )


def fleet_plan(arm: Arm, *, seed: int) -> FleetPlan:
    """The workers that the arm's runs had. `seed`: of the run."""
    counts = {Role.PREFILL: 1, Role.DECODE: 1} if arm is Arm.APART else {Role.BOTH: 2}
    return FleetPlan(
        pools={
            role: PoolPlan(num_workers=count, chunk_tokens=arm.chunk_tokens, max_running=MAX_RUNNING)
            for role, count in counts.items()
        },
        seed=seed,
    )


def _felt_figures(records: Sequence[RunRecord]) -> dict[str, NDArray[np.float64]]:
    answered = [felt for record in records for felt in record.felt if felt.complete]
    return {figure: np.array([getattr(felt, figure) for felt in answered], dtype=np.float64) for figure in FIGURES}


def _simulated_figures(results: Sequence[FleetResult]) -> dict[str, NDArray[np.float64]]:
    return {figure: np.concatenate([getattr(result, figure) for result in results]) for figure in FIGURES}


def _compared_attainment(
    slo: Slo, prefill_s: float, records: Sequence[RunRecord], results: Sequence[FleetResult]
) -> Comparison:
    """Over all requests, as the percentiles are."""
    ttft_s = slo.ttft_prefills * prefill_s
    simulated = [result.attainment(ttft_s=ttft_s, tpot_s=slo.tpot_s, worst_gap_s=slo.stall_s) for result in results]
    weights = [len(record.felt) for record in records]
    return compare_attainment(
        real=float(np.average([record.summary.attainment or 0.0 for record in records], weights=weights)),
        simulated=float(np.average(simulated, weights=weights)),
    )


def _is_misordered(one: Comparison, other: Comparison) -> bool:
    difference = one.real - other.real
    tie = ATTAINMENT_TOLERANCE if one.figure == "attainment" else TIE_SHARE * max(one.real, other.real)
    return abs(difference) > tie and difference * (one.simulated - other.simulated) <= 0
