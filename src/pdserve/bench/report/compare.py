"""`pdserve bench compare`: what B changes against A, request by request.

Two runs are compared when they sent the same arrival list. Then request i of one is paired with request i of the other,
and a resample draws pairs, so that what both runs have in common (a burst, a long prompt) cancels out.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from pdserve.bench.load.result import RESULT_VERSION, LoadResult, SentRequest
from pdserve.bench.load.summary import e2e_s, gaps_s, is_good, num_tokens, tpot_s, ttft_s
from pdserve.bench.report.bootstrap import Counts, Effect, Interval, Samples, intervals
from pdserve.errors import ConfigError
from pdserve.workload.objective import Objective

PERCENTS = (50.0, 90.0, 99.0)

DUE_TOLERANCE_S = 1e-6
"""Of the same instant written and read back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    name: str
    a: float
    b: float
    effect: Effect
    value: float
    interval: Interval


def compare_files(a: Path, b: Path) -> str:
    """A table for people. Raises: `ConfigError` when a file is no result, or the two can't be paired."""
    first, second = read_result(a), read_result(b)
    _require_same_arrivals(first.requests, second.requests)
    lines = [f"A: {_origin(a, first)}", f"B: {_origin(b, second)}", *_differences(first, second), ""]
    lines.append(f"{'':<24}{'A':>12}{'B':>12}{'B : A':>12}   95% interval")
    lines += [_line(row) for row in compare(first, second)]
    if first.objective != second.objective:
        lines.append("attainment is left out: the two runs had different objectives")
    return "\n".join(lines)


def read_result(path: Path) -> LoadResult:
    """Raises: `ConfigError`."""
    try:
        result = msgspec.json.decode(path.read_bytes(), type=LoadResult)
    except OSError as error:
        raise ConfigError(f"can't read {path}: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not a result.json of `pdserve bench`: {error}") from error
    if result.version != RESULT_VERSION:
        raise ConfigError(f"{path} has version {result.version}, this pdserve reads {RESULT_VERSION}: measure it again")
    if not result.requests:
        raise ConfigError(f"{path} has no requests: nothing can be compared")
    return result


def compare(a: LoadResult, b: LoadResult) -> list[Row]:
    """Requires: the same arrivals."""
    metrics: list[tuple[str, Callable[[SentRequest], Sequence[float]]]] = [
        ("TTFT", lambda request: (ttft_s(request),)),
        ("TPOT", lambda request: () if (mean := tpot_s(request)) is None else (mean,)),
        ("ITL", gaps_s),
        ("end to end", lambda request: (e2e_s(request),)),
    ]
    names = [f"{name} p{percent:g}" for name, _ in metrics for percent in PERCENTS]
    pair = [_Run(run, [values for _, values in metrics], a.objective) for run in (a, b)]
    names.append("tokens/s")
    effects = [Effect.RATIO] * len(names)
    if a.objective == b.objective != Objective():
        names.append("attainment")
        effects.append(Effect.DIFFERENCE)

    def statistics(counts: Counts) -> list[float]:
        first, second = (run.statistics(counts) for run in pair)
        return [_effect(effect, x, y) for effect, x, y in zip(effects, first, second, strict=False)]

    once = np.ones(len(a.requests), dtype=np.int64)
    told = zip(names, effects, *(run.statistics(once) for run in pair), intervals(len(once), statistics), strict=False)
    return [
        Row(name=name, a=x, b=y, effect=effect, value=_effect(effect, x, y), interval=interval)
        for name, effect, x, y, interval in told
    ]


class _Run:
    """One run as samples; its duration stays what it was in every resample."""

    def __init__(
        self, result: LoadResult, metrics: Sequence[Callable[[SentRequest], Sequence[float]]], objective: Objective
    ) -> None:
        self._samples = [
            Samples([metric(request) if request.token_s else () for request in result.requests]) for metric in metrics
        ]
        self._num_tokens = np.array([num_tokens(request) for request in result.requests])
        self._good = np.array([is_good(request, objective) for request in result.requests])
        self._duration_s = result.summary.duration_s

    def statistics(self, counts: Counts) -> list[float]:
        found = [value for samples in self._samples for value in samples.percentiles(PERCENTS, counts)]
        tokens_per_s = float(self._num_tokens @ counts) / self._duration_s if self._duration_s > 0 else math.nan
        return [*found, tokens_per_s, float(self._good @ counts) / float(counts.sum())]


def _effect(effect: Effect, a: float, b: float) -> float:
    """NaN for a ratio to nothing: tokens that came together have gaps of 0."""
    if effect is Effect.DIFFERENCE:
        return b - a
    return b / a if a else math.nan


def _require_same_arrivals(a: Sequence[SentRequest], b: Sequence[SentRequest]) -> None:
    """Raises: `ConfigError` that names the first difference."""
    advice = "run both with the same workload and seed"
    if len(a) != len(b):
        raise ConfigError(f"A has {len(a)} requests and B {len(b)}, so they can't be paired: {advice}")
    for index, (first, second) in enumerate(zip(a, b, strict=True)):
        lengths = [(one.num_prompt_tokens, one.num_output_tokens) for one in (first, second)]
        if abs(first.due_s - second.due_s) > DUE_TOLERANCE_S or lengths[0] != lengths[1]:
            told = [f"{one.due_s:.3f} s ({one.num_prompt_tokens}/{one.num_output_tokens})" for one in (first, second)]
            raise ConfigError(
                f"request {index} is due at {told[0]} in A and at {told[1]} in B, so they can't be paired: {advice}"
            )


def _origin(path: Path, result: LoadResult) -> str:
    summary = result.summary
    steal = result.disturbance.steal_share
    stolen = "" if steal is None else f", {100 * steal:.0f}% stolen"
    return (
        f"{path}, {result.started}, commit {result.commit or 'unknown'}, "
        f"{summary.num_completed} of {summary.num_requests} completed{stolen}"
    )


def _differences(a: LoadResult, b: LoadResult) -> list[str]:
    """The settings in which the runs differ, since nothing else should."""
    names = sorted({*a.configuration, *b.configuration})
    pairs = [(name, a.configuration.get(name, "-"), b.configuration.get(name, "-")) for name in names]
    return [f"{name}: {first} in A, {second} in B" for name, first, second in pairs if first != second]


def _line(row: Row) -> str:
    if math.isnan(row.value):
        return f"{row.name:<24}{row.a:>12.4g}{row.b:>12.4g}{'-':>12}"
    interval = row.interval.told(row.effect)
    match row.effect:
        case Effect.RATIO:
            unit = "" if row.name == "tokens/s" else " s"
            shown = f"{row.name:<24}{f'{row.a:.4g}{unit}':>12}{f'{row.b:.4g}{unit}':>12}{row.value:>12.3f}"
            return f"{shown}   {interval}"
        case Effect.DIFFERENCE:
            shown = f"{row.name:<24}{f'{100 * row.a:.1f}%':>12}{f'{100 * row.b:.1f}%':>12}"
            points = f"{100 * row.value:+.1f} pp"
            return f"{shown}{points:>12}   {interval}"
