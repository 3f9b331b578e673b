"""Draws the pictures of the experiment on two cores from its book: `plot_two_cores.py [BOOK.json]`."""

# matplotlib's own annotations are partly unknown.
# pyright: reportUnknownMemberType=false

import sys
from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from pdserve.bench.experiment.book import Book, RunRecord, load
from pdserve.bench.experiment.effects import EffectRow, effects
from pdserve.bench.experiment.points import POINTS, Arm, Point

DOCS = Path(__file__).parents[1] / "docs"
COLORS = {Arm.WHOLE: "#dd8452", Arm.CHUNKED: "#8172b3", Arm.APART: "#4c72b0"}
NAMES = {
    Arm.WHOLE: "A: two colocated, whole prompts",
    Arm.CHUNKED: "A': two colocated, chunks",
    Arm.APART: "B: one prefill, one decode",
}
SHOWN_METRICS = ("tokens/s of a user", "ITL p99", "TTFT p50")
RATIO_TICKS = (0.1, 0.2, 0.5, 1, 2, 5)
NUM_TPOT_LIMITS = 100
MAX_TPOT_S = 0.3


def main() -> None:
    book = load(Path(sys.argv[1]) if len(sys.argv) > 1 else DOCS / "results" / "two_cores.json")
    points = [point for point in POINTS if any(record.point == point for record in book.made.values())]
    draw_effects(book, points)
    draw_goodput(book, points)


def draw_effects(book: Book, points: Sequence[Point]) -> None:
    """Ratios of B to both baselines, with their intervals, on a log axis: as far up for twice as for half."""
    rows = [row for row in effects(book.made, points) if row.arm is Arm.APART]
    figure, panels = plt.subplots(1, len(SHOWN_METRICS), figsize=(14, 4.5), dpi=100, sharey=True)
    for axes, metric in zip(panels, SHOWN_METRICS, strict=True):
        for offset, baseline in ((-0.12, Arm.WHOLE), (0.12, Arm.CHUNKED)):
            chosen = [row for row in rows if row.metric == metric and row.baseline_arm is baseline]
            _intervals(axes, chosen, [point.name for point in points], offset=offset, baseline=baseline)
        axes.axhline(1.0, color="black", linewidth=0.8)
        axes.set_title(metric)
        axes.set_xticks(range(len(points)), [point.name.replace("@", "\nat ") for point in points])
        axes.grid(axis="y", alpha=0.3)
    panels[0].set_yscale("log")
    panels[0].set_yticks(RATIO_TICKS, [f"{tick:g}" for tick in RATIO_TICKS])
    panels[0].minorticks_off()
    panels[0].set_ylabel("B : baseline, 95% interval over blocks")
    panels[0].legend()
    figure.tight_layout()
    figure.savefig(DOCS / "bench-two-cores.png")
    plt.close(figure)


def _intervals(axes: Axes, rows: Sequence[EffectRow], names: Sequence[str], *, offset: float, baseline: Arm) -> None:
    places = [names.index(row.point) + offset for row in rows]
    values = [row.effect for row in rows]
    errors = [[row.effect - row.interval.low for row in rows], [row.interval.high - row.effect for row in rows]]
    axes.errorbar(
        places, values, yerr=errors, fmt="o", capsize=4, color=COLORS[baseline], label=f"to {NAMES[baseline]}"
    )


def draw_goodput(book: Book, points: Sequence[Point]) -> None:
    """For each point, the share of requests that keep the objective's TTFT and stall limits, over the limit of TPOT."""
    figure, panels = plt.subplots(1, len(points), figsize=(3.4 * len(points) + 1, 3.8), dpi=100, squeeze=False)
    limits_s = [MAX_TPOT_S * index / NUM_TPOT_LIMITS for index in range(NUM_TPOT_LIMITS + 1)]
    for axes, point in zip(panels[0], points, strict=True):
        for arm in Arm:
            records = [record for run, record in book.made.items() if (run.point, run.arm) == (point, arm)]
            shares = [100 * good_share(book, records, tpot_s=limit_s) for limit_s in limits_s] if records else []
            axes.plot(
                [1e3 * limit_s for limit_s in limits_s[: len(shares)]], shares, color=COLORS[arm], label=NAMES[arm]
            )
        axes.axvline(1e3 * book.slo.tpot_s, color="black", linestyle="--", linewidth=0.8)
        axes.set_title(point.name)
        axes.set_xlabel("limit of mean TPOT, ms")
        axes.set_ylim(0, 102)
    panels[0][0].set_ylabel("% of requests within all limits")
    panels[0][0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(DOCS / "bench-two-cores-goodput.png")
    plt.close(figure)


def good_share(book: Book, records: Sequence[RunRecord], *, tpot_s: float) -> float:
    """Over all requests of the runs; one that failed is not good."""
    point = records[0].point
    objective = book.objective(point)
    found = [one for record in records for one in record.felt]
    limits = (objective.ttft_s, tpot_s, objective.stall_s)
    num_good = sum(
        one.complete
        and all(
            value is None or limit is None or value <= limit
            for value, limit in zip((one.ttft_s, one.tpot_s, one.worst_gap_s), limits, strict=True)
        )
        for one in found
    )
    return num_good / len(found)


if __name__ == "__main__":
    main()
