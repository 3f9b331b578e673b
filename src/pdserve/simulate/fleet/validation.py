"""How near a simulated run comes to a real one of the same arrivals."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pdserve.percentile import percentile
from pdserve.simulate.fleet.result import FleetResult

TOLERANCES = ((50, 0.10), (90, 0.15), (99, 0.25))
"""Percentiles, and by which share of the real one the simulated one may be off."""

ATTAINMENT_TOLERANCE = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One figure of both runs."""

    figure: str
    real: float
    simulated: float
    error: float
    """Of the simulated one; a share of the real one, or for attainment a difference of shares."""
    tolerance: float

    @property
    def is_near(self) -> bool:
        return abs(self.error) <= self.tolerance

    def __str__(self) -> str:
        verdict = "ok" if self.is_near else "off"
        return (
            f"{self.figure:<16} real {self.real:10.4f}  simulated {self.simulated:10.4f}  "
            f"error {self.error:+7.1%} of {self.tolerance:.0%}  {verdict}"
        )


def compare_percentiles(
    real: Mapping[str, NDArray[np.float64]], simulated: Mapping[str, NDArray[np.float64]]
) -> list[Comparison]:
    """Of each figure that both have, by name; NaN stands for a request that has no such figure."""
    comparisons: list[Comparison] = []
    for name, values in real.items():
        real_values, simulated_values = values[~np.isnan(values)], simulated[name][~np.isnan(simulated[name])]
        if not len(real_values) or not len(simulated_values):
            continue
        for percent, tolerance in TOLERANCES:
            before, after = (percentile(each.tolist(), percent) for each in (real_values, simulated_values))
            comparisons.append(
                Comparison(
                    figure=f"{name} p{percent}",
                    real=before,
                    simulated=after,
                    error=(after - before) / before if before > 0 else float("inf"),
                    tolerance=tolerance,
                )
            )
    return comparisons


def compare_attainment(*, real: float, simulated: float) -> Comparison:
    return Comparison(
        figure="attainment",
        real=real,
        simulated=simulated,
        error=simulated - real,
        tolerance=ATTAINMENT_TOLERANCE,
    )


def figures_of(result: FleetResult) -> dict[str, NDArray[np.float64]]:
    """What `compare_percentiles` compares."""
    return {
        "ttft_s": result.ttft_s,
        "tpot_s": result.tpot_s,
        "worst_gap_s": result.worst_gap_s,
        "e2e_s": result.e2e_s,
    }
