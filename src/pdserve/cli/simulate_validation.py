"""`pdserve simulate --validate RESULT.json`: a run of the load generator again, on a virtual clock."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from pdserve.bench.load.result import LoadResult, SentRequest
from pdserve.bench.load.summary import e2e_s, is_complete, num_tokens, tpot_s, ttft_s, worst_gap_s
from pdserve.simulate.fleet.result import FleetResult
from pdserve.simulate.fleet.validation import Comparison, compare_attainment, compare_percentiles, figures_of
from pdserve.workload.request import WorkloadRequest


def workload_of(run: LoadResult) -> list[WorkloadRequest]:
    """The requests as they were sent, and with as many tokens as they were answered with."""
    ordered = sorted(run.requests, key=lambda request: request.sent_s)
    return [
        WorkloadRequest(
            arrival_s=request.sent_s - ordered[0].sent_s,
            num_prompt_tokens=request.num_prompt_tokens,
            num_output_tokens=num_tokens(request) if is_complete(request) else request.num_output_tokens,
        )
        for request in ordered
    ]


def compare_runs(run: LoadResult, simulated: FleetResult) -> list[Comparison]:
    """Each figure of both; attainment too where the run had an objective."""
    comparisons = compare_percentiles(_figures_of(run), figures_of(simulated))
    if run.summary.attainment is not None:
        attainment = simulated.attainment(
            ttft_s=_limit(run.objective.ttft_s),
            tpot_s=_limit(run.objective.tpot_s),
            worst_gap_s=_limit(run.objective.stall_s),
        )
        comparisons.append(compare_attainment(real=run.summary.attainment, simulated=attainment))
    return comparisons


def _limit(wanted_s: float | None) -> float:
    return float("inf") if wanted_s is None else wanted_s


def _figures_of(run: LoadResult) -> dict[str, NDArray[np.float64]]:
    answered = [request for request in run.requests if is_complete(request)]
    figures: dict[str, Callable[[SentRequest], float | None]] = {
        "ttft_s": ttft_s,
        "tpot_s": tpot_s,
        "worst_gap_s": worst_gap_s,
        "e2e_s": e2e_s,
    }
    return {
        name: np.array([value for request in answered if (value := figure(request)) is not None])
        for name, figure in figures.items()
    }
