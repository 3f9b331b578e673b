"""The plots of one run, from its requests."""

from bisect import bisect_right
from collections.abc import Iterable, Sequence

from pdserve.bench.load.result import LoadResult, SentRequest
from pdserve.bench.load.summary import e2e_s, gaps_s, is_good, tpot_s, ttft_s
from pdserve.bench.report.chart import Axis, Limit, Mark, Point, Series, axis_over, line_chart
from pdserve.workload.objective import Objective

DEFAULT_TTFT_S = 1.0
"""Around which the goodput curves lie when the run had no objective for TTFT."""

TTFT_FACTORS = (0.5, 1.0, 2.0)
NUM_TPOT_LIMITS = 80
SHARE = Axis(label="% of all", start=0.0, stop=104.0)


def charts(result: LoadResult) -> list[str]:
    answered = [request for request in result.requests if request.token_s]
    return [
        ttft_cdf(answered, result.objective),
        itl_cdf(answered, result.objective),
        requests_over_time(result.requests),
        goodput_curves(result.requests, result.objective),
        end_to_end_cdf(answered),
        lateness(result.requests),
    ]


def ttft_cdf(answered: Sequence[SentRequest], objective: Objective) -> str:
    values = [ttft_s(request) for request in answered]
    limits = _limits(objective.ttft_s, "TTFT at most")
    return _cdf("Time to first token", values, label="seconds", limits=limits)


def itl_cdf(answered: Sequence[SentRequest], objective: Objective) -> str:
    values = [1e3 * gap for request in answered for gap in gaps_s(request)]
    limits = [
        Limit(x=1e3 * limit_s, label=f"{name} at most {1e3 * limit_s:g} ms")
        for limit_s, name in ((objective.tpot_s, "TPOT"), (objective.stall_s, "stall"))
        if limit_s is not None
    ]
    return _cdf("Gaps between tokens (ITL), of all requests", values, label="milliseconds", limits=limits)


def end_to_end_cdf(answered: Sequence[SentRequest]) -> str:
    return _cdf("From sent to last token", [e2e_s(request) for request in answered], label="seconds", limits=())


def requests_over_time(requests: Sequence[SentRequest]) -> str:
    """In flight, over a rug of arrivals; what failed or was refused is a dot at the number then in flight."""
    changes = [(request.sent_s, 1) for request in requests]
    changes += [(request.ended_s, -1) for request in requests if request.ended_s is not None]
    in_flight: list[Point] = [(0.0, 0.0)]
    for instant_s, change in sorted(changes):
        in_flight.append((instant_s, in_flight[-1][1] + change))
    failures = [
        (request.ended_s, _value_at(in_flight, request.ended_s))
        for request in requests
        if request.ended_s is not None and request.error is not None
    ]
    series = [
        Series(label="in flight", points=in_flight, color=0, mark=Mark.STEP),
        Series(label="due", points=[(request.due_s, 0.0) for request in requests], color=2, mark=Mark.TICKS),
        Series(label="failed or refused", points=failures, color=1, mark=Mark.DOTS),
    ]
    x = axis_over("seconds since the start", [instant_s for instant_s, _ in in_flight])
    return line_chart("Requests over time", series, x, axis_over("requests", [count for _, count in in_flight]))


def lateness(requests: Sequence[SentRequest]) -> str:
    points = [(request.due_s, 1e3 * max(0.0, request.sent_s - request.due_s)) for request in requests]
    series = [Series(label="lateness", points=points, color=4, mark=Mark.DOTS)]
    x = axis_over("seconds since the start", [due_s for due_s, _ in points])
    y = axis_over("milliseconds", [late_ms for _, late_ms in points])
    return line_chart("How late the generator sent each request", series, x, y)


def goodput_curves(requests: Sequence[SentRequest], objective: Objective) -> str:
    """The share of good requests over the limit of TPOT, a curve each for three limits of TTFT."""
    tpots = [tpot for request in requests if (tpot := tpot_s(request))]
    if not tpots:
        return ""
    stop_s = 1.3 * max(*tpots, objective.tpot_s or 0.0)
    around_s = objective.ttft_s or DEFAULT_TTFT_S
    series = [
        Series(
            label=f"TTFT at most {around_s * factor:g} s",
            points=good_shares(requests, ttft_limit_s=around_s * factor, stop_s=stop_s, objective=objective),
            color=color,
        )
        for color, factor in enumerate(TTFT_FACTORS)
    ]
    x = Axis(label="limit of mean TPOT, milliseconds", start=0.0, stop=1e3 * stop_s)
    marks = [] if objective.tpot_s is None else [Limit(x=1e3 * objective.tpot_s, label="the objective")]
    return line_chart("Good requests, were the objective another", series, x, SHARE, limits=marks)


def good_shares(
    requests: Sequence[SentRequest], *, ttft_limit_s: float, stop_s: float, objective: Objective
) -> list[Point]:
    """In percent of all requests, over limits of TPOT in ms up to `stop_s`; the limit of stalls is the objective's."""
    others = Objective(ttft_s=ttft_limit_s, stall_s=objective.stall_s)
    tpots = sorted(tpot_s(request) or 0.0 for request in requests if is_good(request, others))
    limits_s = [stop_s * index / NUM_TPOT_LIMITS for index in range(NUM_TPOT_LIMITS + 1)]
    return [(1e3 * limit_s, 100 * bisect_right(tpots, limit_s) / len(requests)) for limit_s in limits_s]


def _cdf(title: str, values: Iterable[float], *, label: str, limits: Sequence[Limit]) -> str:
    ordered = sorted(values)
    if not ordered:
        return ""
    points = [(value, 100 * rank / len(ordered)) for rank, value in enumerate(ordered, start=1)]
    x = axis_over(label, [*ordered, *(limit.x for limit in limits)], log=ordered[-1] > 20 * max(ordered[0], 1e-9))
    return line_chart(title, [Series(label=title, points=points, color=0, mark=Mark.STEP)], x, SHARE, limits=limits)


def _limits(limit_s: float | None, name: str) -> list[Limit]:
    return [] if limit_s is None else [Limit(x=limit_s, label=f"{name} {limit_s:g} s")]


def _value_at(steps: Sequence[Point], instant: float) -> float:
    return next(value for start, value in reversed(steps) if start <= instant)
