"""What one arm changes against another: means over blocks, with intervals from resampled blocks.

A block is one seed at one point: both arms got the same arrivals. The requests of a run share its good and bad moments,
and are no independent samples; blocks are.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence

import msgspec
import numpy as np

from pdserve.bench.experiment.book import Book, RunRecord
from pdserve.bench.experiment.points import Arm, Point
from pdserve.bench.experiment.schedule import Run
from pdserve.bench.report.bootstrap import Counts, Effect, Interval, intervals

PAIRS = ((Arm.WHOLE, Arm.APART), (Arm.CHUNKED, Arm.APART), (Arm.WHOLE, Arm.CHUNKED))
"""A baseline, and what is compared with it."""


class EffectRow(msgspec.Struct, frozen=True, kw_only=True):
    point: str
    metric: str
    baseline_arm: Arm
    arm: Arm
    baseline: float
    """The median of its runs."""
    value: float
    kind: Effect
    effect: float
    """The geometric mean of the blocks' ratios, or the mean of their differences."""
    interval: Interval
    num_blocks: int


def effects(records: Mapping[Run, RunRecord], points: Sequence[Point]) -> list[EffectRow]:
    """For each point, metric and pair of arms that have a block in common."""
    rows: list[EffectRow] = []
    for point in points:
        for baseline_arm, arm in PAIRS:
            blocks = _blocks(records, point, baseline_arm, arm)
            rows += [row for metric in METRICS if (row := _row(point, metric, baseline_arm, arm, blocks)) is not None]
    return rows


def _user_speed(record: RunRecord) -> float | None:
    """The median of the requests' tokens a second."""
    tpots = [one.tpot_s for one in record.felt if one.tpot_s]
    return 1 / statistics.median_high(tpots) if tpots else None


METRICS: tuple[tuple[str, Effect, Callable[[RunRecord], float | None]], ...] = (
    ("tokens/s of a user", Effect.RATIO, _user_speed),
    ("TPOT p90", Effect.RATIO, lambda record: record.summary.tpot and record.summary.tpot.p90),
    ("ITL p50", Effect.RATIO, lambda record: record.summary.itl and record.summary.itl.p50),
    ("ITL p99", Effect.RATIO, lambda record: record.summary.itl and record.summary.itl.p99),
    ("worst gap p50", Effect.RATIO, lambda record: record.summary.worst_gap and record.summary.worst_gap.p50),
    ("TTFT p50", Effect.RATIO, lambda record: record.summary.ttft and record.summary.ttft.p50),
    ("TTFT p90", Effect.RATIO, lambda record: record.summary.ttft and record.summary.ttft.p90),
    ("tokens/s of all", Effect.RATIO, lambda record: record.summary.output_tokens_per_s),
    ("attainment", Effect.DIFFERENCE, lambda record: record.summary.attainment),
)


def _blocks(
    records: Mapping[Run, RunRecord], point: Point, baseline_arm: Arm, arm: Arm
) -> list[tuple[RunRecord, RunRecord]]:
    found = {(run.seed, run.arm): record for run, record in records.items() if run.point == point}
    seeds = sorted({seed for seed, _ in found})
    return [
        (found[seed, baseline_arm], found[seed, arm])
        for seed in seeds
        if (seed, baseline_arm) in found and (seed, arm) in found
    ]


def _row(
    point: Point,
    metric: tuple[str, Effect, Callable[[RunRecord], float | None]],
    baseline_arm: Arm,
    arm: Arm,
    blocks: Sequence[tuple[RunRecord, RunRecord]],
) -> EffectRow | None:
    """None where no block has the metric on both sides."""
    name, kind, value_of = metric
    pairs = [(value_of(baseline), value_of(changed)) for baseline, changed in blocks]
    known = [
        (x, y) for x, y in pairs if x is not None and y is not None and (kind is Effect.DIFFERENCE or min(x, y) > 0)
    ]
    if not known:
        return None
    changes = np.array([y - x if kind is Effect.DIFFERENCE else math.log(y / x) for x, y in known])

    def mean(counts: Counts) -> tuple[float]:
        return (float(changes @ counts) / float(counts.sum()),)

    (interval,) = intervals(len(changes), mean)
    as_told: Callable[[float], float] = math.exp if kind is Effect.RATIO else float
    return EffectRow(
        point=point.name,
        metric=name,
        baseline_arm=baseline_arm,
        arm=arm,
        baseline=float(np.median([x for x, _ in known])),
        value=float(np.median([y for _, y in known])),
        kind=kind,
        effect=as_told(float(changes.mean())),
        interval=Interval(low=as_told(interval.low), high=as_told(interval.high)),
        num_blocks=len(known),
    )


def table(book: Book, points: Sequence[Point]) -> str:
    """For people: a section for each point that has runs. What all runs say stands beside what those say that count."""
    counted = {_key(row): row for row in effects(book.counted, points)}
    rows, judged = effects(book.made, points), book.judged()
    lines: list[str] = []
    for point in points:
        voids = [void for record, void in judged if record.point == point]
        if not voids:
            continue
        rate = point.rate_per_s(book.reference.prefill_s[point.num_prompt_tokens])
        num_void = sum(void is not None for void in voids)
        lines.append(f"{point.name}: {rate:.2f} requests/s, {len(voids)} runs, {num_void} of them void")
        for baseline_arm, arm in PAIRS:
            pair = [row for row in rows if (row.point, row.baseline_arm, row.arm) == (point.name, baseline_arm, arm)]
            if pair:
                heads = (baseline_arm.value, arm.value, f"{arm.value} : {baseline_arm.value}")
                head = f"  {'':<20}{heads[0]:>9}{heads[1]:>9}{heads[2]:>10} {'95% interval':>18}, blocks"
                lines.append(f"{head}   without void runs")
            lines += [_line(row, counted.get(_key(row))) for row in pair]
    return "\n".join(lines)


def _key(row: EffectRow) -> tuple[str, str, Arm, Arm]:
    return row.point, row.metric, row.baseline_arm, row.arm


def _line(row: EffectRow, counted: EffectRow | None) -> str:
    if row.kind is Effect.DIFFERENCE:
        values = f"{100 * row.baseline:>8.1f}%{100 * row.value:>8.1f}%"
    else:
        values = f"{row.baseline:>9.4g}{row.value:>9.4g}"
    told = "-" if counted is None else _effect(counted).strip()
    return f"  {row.metric:<20}{values}{_effect(row)}        {told}"


def _effect(row: EffectRow) -> str:
    effect = f"{100 * row.effect:>+7.1f} pp" if row.kind is Effect.DIFFERENCE else f"{row.effect:>10.3f}"
    return f"{effect} {row.interval.told(row.kind):>18}, {row.num_blocks}"
