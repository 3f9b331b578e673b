"""What a run comes to: the latencies of its requests, and how many of them met the objective.

TTFT and end-to-end time count from when a request was sent, not from when it was due; how late it was sent is told
beside them. Tokens of requests that broke off count in the latencies of what came, and in no other way.
"""

import itertools
from collections.abc import Iterable, Sequence

from pdserve.bench.load.result import Distribution, SentRequest, Summary
from pdserve.percentile import percentile_of_sorted
from pdserve.workload.objective import Objective

REFUSALS = (429, 503)


def summarise(requests: Sequence[SentRequest], objective: Objective) -> Summary:
    """Attainment and goodput are None without an objective; a request that was cut short missed it."""
    answered = [request for request in requests if request.token_s]
    complete = [request for request in requests if is_complete(request)]
    num_refused = sum(request.status in REFUSALS for request in requests)
    num_failed = sum(request.error is not None and request.status not in REFUSALS for request in requests)
    duration_s = _duration_s(requests)
    is_judged = bool(requests) and objective != Objective()
    num_good = sum(is_good(request, objective) for request in requests)
    return Summary(
        num_requests=len(requests),
        num_completed=len(complete),
        num_refused=num_refused,
        num_failed=num_failed,
        duration_s=duration_s,
        ttft=distribution(map(ttft_s, answered)),
        tpot=distribution(tpot for request in answered if (tpot := tpot_s(request)) is not None),
        itl=distribution(gap for request in answered for gap in gaps_s(request)),
        worst_gap=distribution(gap for request in answered if (gap := worst_gap_s(request)) is not None),
        e2e=distribution(map(e2e_s, complete)),
        lateness=distribution(request.sent_s - request.due_s for request in requests),
        output_tokens_per_s=_rate(sum(map(num_tokens, requests)), duration_s),
        requests_per_s=_rate(len(complete), duration_s),
        attainment=num_good / len(requests) if is_judged else None,
        goodput_per_s=_rate(num_good, duration_s) if is_judged else None,
    )


def is_complete(request: SentRequest) -> bool:
    return request.finish_reason is not None and request.error is None and bool(request.token_s)


def is_good(request: SentRequest, objective: Objective) -> bool:
    """Whether it was answered whole and met all of the objective."""
    return is_complete(request) and all(
        limit is None or value is None or value <= limit
        for value, limit in (
            (ttft_s(request), objective.ttft_s),
            (tpot_s(request), objective.tpot_s),
            (worst_gap_s(request), objective.stall_s),
        )
    )


def num_tokens(request: SentRequest) -> int:
    """Of the answer: as the server counted them, where its chunks hold several, or as they came."""
    return request.num_generated if request.num_generated is not None else len(request.token_s)


def ttft_s(request: SentRequest) -> float:
    """Requires: a token came."""
    return request.token_s[0] - request.sent_s


def gaps_s(request: SentRequest) -> list[float]:
    return [after - before for before, after in itertools.pairwise(request.token_s)]


def worst_gap_s(request: SentRequest) -> float | None:
    """The longest; None for fewer than two tokens."""
    return max(gaps_s(request), default=None)


def tpot_s(request: SentRequest) -> float | None:
    """The mean gap; None for fewer than two tokens."""
    if len(request.token_s) < 2:
        return None
    return (request.token_s[-1] - request.token_s[0]) / (num_tokens(request) - 1)


def e2e_s(request: SentRequest) -> float:
    """Until the last token. Requires: a token came."""
    return request.token_s[-1] - request.sent_s


def distribution(samples: Iterable[float]) -> Distribution | None:
    """None where there is no sample."""
    ordered = sorted(samples)
    if not ordered:
        return None
    p50, p90, p99 = (percentile_of_sorted(ordered, percent) for percent in (50, 90, 99))
    return Distribution(
        num_samples=len(ordered), mean=sum(ordered) / len(ordered), p50=p50, p90=p90, p99=p99, max=ordered[-1]
    )


def _duration_s(requests: Sequence[SentRequest]) -> float:
    ends = [request.token_s[-1] if request.token_s else request.ended_s or request.sent_s for request in requests]
    return max(ends) - min(request.due_s for request in requests) if requests else 0.0


def _rate(count: int, duration_s: float) -> float:
    return count / duration_s if duration_s > 0 else 0.0
