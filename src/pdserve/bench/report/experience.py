"""What the client of one request felt, and whether that was good enough."""

from pdserve.bench.load.result import Objective, SentRequest


def is_complete(request: SentRequest) -> bool:
    return request.finish_reason is not None and request.error is None and bool(request.token_s)


def ttft_s(request: SentRequest) -> float:
    """Requires: a token came."""
    return request.token_s[0] - request.sent_s


def gaps_s(request: SentRequest) -> tuple[float, ...]:
    return tuple(after - before for before, after in zip(request.token_s, request.token_s[1:], strict=False))


def tpot_s(request: SentRequest) -> float | None:
    """The mean gap; None for fewer than two tokens."""
    if len(request.token_s) < 2:
        return None
    return (request.token_s[-1] - request.token_s[0]) / (len(request.token_s) - 1)


def e2e_s(request: SentRequest) -> float:
    """Until the last token. Requires: a token came."""
    return request.token_s[-1] - request.sent_s


def is_good(request: SentRequest, objective: Objective) -> bool:
    """Whether it was answered whole and met all of the objective."""
    return is_complete(request) and all(
        limit is None or value is None or value <= limit
        for value, limit in (
            (ttft_s(request), objective.ttft_s),
            (tpot_s(request), objective.tpot_s),
            (max(gaps_s(request), default=None), objective.stall_s),
        )
    )
