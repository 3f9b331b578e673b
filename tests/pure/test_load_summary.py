"""The summary of a load against a slow one written out longhand, and the edges of what counts as good."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.bench.load.result import Distribution, SentRequest
from pdserve.bench.load.summary import distribution, is_good, summarise
from pdserve.errors import ConfigError
from pdserve.percentile import percentile
from pdserve.workload.objective import Objective, parse_objective

GOOD = SentRequest(
    due_s=1.0,
    sent_s=1.25,
    num_prompt_tokens=8,
    num_output_tokens=4,
    token_s=(1.75, 2.0, 2.25, 3.25),
    ended_s=3.25,
    finish_reason="length",
    status=200,
)
"""TTFT 0.5, gaps 0.25, 0.25 and 1, TPOT 0.5."""


@st.composite
def sent_requests(draw: st.DrawFn) -> SentRequest:
    due_s = draw(st.integers(0, 40)) / 4
    sent_s = due_s + draw(st.integers(0, 4)) / 4
    gaps = draw(st.lists(st.integers(0, 8), max_size=6))
    token_s = tuple(sent_s + sum(gaps[: number + 1]) / 4 for number in range(len(gaps)))
    last_s = token_s[-1] if token_s else sent_s
    outcome = draw(st.sampled_from(["whole", "refused", "full", "failed", "unfinished"]))
    whole = outcome == "whole" and bool(token_s)
    return SentRequest(
        due_s=due_s,
        sent_s=sent_s,
        num_prompt_tokens=1,
        num_output_tokens=6,
        token_s=() if outcome in ("refused", "full") else token_s,
        ended_s=None if outcome == "unfinished" else last_s,
        finish_reason="length" if whole else None,
        status={"refused": 429, "full": 503, "unfinished": None}.get(outcome, 200),
        error=None if whole or outcome == "unfinished" else "said so",
    )


limits = st.none() | st.integers(1, 12).map(lambda quarters: quarters / 4)
objectives = st.builds(Objective, ttft_s=limits, tpot_s=limits, stall_s=limits)


def slow_percentile(samples: list[float], percent: float) -> float:
    """The smallest sample with at least that share at or under it."""
    return min(
        sample for sample in samples if sum(other <= sample for other in samples) * 100 >= percent * len(samples)
    )


def slow_is_good(request: SentRequest, objective: Objective) -> bool:
    if request.error is not None or request.finish_reason is None or request.ended_s is None or not request.token_s:
        return False
    tokens = list(request.token_s)
    if objective.ttft_s is not None and tokens[0] - request.sent_s > objective.ttft_s:
        return False
    gaps = [tokens[number] - tokens[number - 1] for number in range(1, len(tokens))]
    if gaps and objective.tpot_s is not None and sum(gaps) / len(gaps) > objective.tpot_s:
        return False
    return not (gaps and objective.stall_s is not None and any(gap > objective.stall_s for gap in gaps))


@given(st.lists(sent_requests(), max_size=12), objectives)
def test_summary_of_any_requests_equals_the_slow_one(requests: list[SentRequest], objective: Objective) -> None:
    summary = summarise(requests, objective)
    assert summary.num_requests == len(requests)
    assert summary.num_completed == sum(slow_is_good(request, Objective()) for request in requests)
    assert summary.num_refused == sum(request.status in (429, 503) for request in requests)
    unfinished = sum(request.ended_s is None for request in requests)
    assert summary.num_completed + summary.num_refused + summary.num_failed + unfinished == len(requests)

    expected = slow_samples(requests)
    for name in ("ttft", "tpot", "itl", "worst_gap", "e2e", "lateness"):
        check_distribution(getattr(summary, name), expected[name])

    good = sum(slow_is_good(request, objective) for request in requests)
    if objective == Objective() or not requests:
        assert summary.attainment is None and summary.goodput_per_s is None
    else:
        assert summary.attainment == pytest.approx(good / len(requests))
        assert summary.goodput_per_s is not None
        assert summary.goodput_per_s * summary.duration_s == pytest.approx(good if summary.duration_s else 0.0)
    num_tokens = sum(len(request.token_s) for request in requests) if summary.duration_s else 0.0
    assert summary.output_tokens_per_s * summary.duration_s == pytest.approx(num_tokens)


def slow_samples(requests: list[SentRequest]) -> dict[str, list[float]]:
    """By the field of the summary."""
    found: dict[str, list[float]] = {name: [] for name in ("ttft", "tpot", "itl", "worst_gap", "e2e", "lateness")}
    for request in requests:
        tokens = list(request.token_s)
        found["lateness"].append(request.sent_s - request.due_s)
        if tokens:
            found["ttft"].append(tokens[0] - request.sent_s)
        if len(tokens) > 1:
            own = [tokens[number + 1] - tokens[number] for number in range(len(tokens) - 1)]
            found["tpot"].append(sum(own) / len(own))
            found["itl"].extend(own)
            found["worst_gap"].append(max(own))
        if slow_is_good(request, Objective()):
            found["e2e"].append(tokens[-1] - request.sent_s)
    return found


def check_distribution(found: Distribution | None, samples: list[float]) -> None:
    if not samples:
        assert found is None
        return
    assert found is not None
    assert found.num_samples == len(samples)
    assert found.mean == pytest.approx(math.fsum(samples) / len(samples))
    assert (found.p50, found.p90, found.p99, found.max) == (
        *(slow_percentile(samples, percent) for percent in (50, 90, 99)),
        max(samples),
    )


@given(st.lists(st.integers(-5, 5), min_size=1, max_size=30), st.integers(0, 100))
def test_percentile_of_samples_in_any_order_equals_the_slow_one(samples: list[float], percent: int) -> None:
    assert percentile(samples, percent) == slow_percentile(samples, percent)


def test_distribution_of_no_samples_is_none() -> None:
    assert distribution([]) is None


@pytest.mark.parametrize(
    ("objective", "is_met"),
    [
        (Objective(ttft_s=0.5, tpot_s=0.5, stall_s=1.0), True),
        (Objective(ttft_s=0.49), False),
        (Objective(tpot_s=0.49), False),
        (Objective(stall_s=0.99), False),
        (Objective(ttft_s=0.5), True),
    ],
)
def test_request_at_the_limits_is_good_and_beyond_one_is_not(objective: Objective, is_met: bool) -> None:
    assert is_good(GOOD, objective) is is_met


def test_request_of_one_token_meets_limits_on_gaps_that_it_has_not() -> None:
    request = SentRequest(
        due_s=0.0,
        sent_s=0.0,
        num_prompt_tokens=8,
        num_output_tokens=1,
        token_s=(0.25,),
        ended_s=0.25,
        finish_reason="length",
    )
    assert is_good(request, Objective(ttft_s=1.0, tpot_s=1e-9, stall_s=1e-9))


def test_answer_in_chunks_of_several_tokens_counts_them_as_the_server_does() -> None:
    request = SentRequest(
        due_s=0.0,
        sent_s=0.0,
        num_prompt_tokens=8,
        num_output_tokens=5,
        token_s=(1.0, 2.0, 3.0),
        num_generated=5,
        ended_s=3.0,
        finish_reason="length",
    )
    summary = summarise([request], Objective())
    assert summary.tpot is not None and summary.itl is not None
    assert (summary.tpot.mean, summary.itl.mean) == (0.5, 1.0)
    assert summary.output_tokens_per_s == pytest.approx(5 / 3)


def test_objective_with_every_limit_is_read_in_seconds() -> None:
    assert parse_objective("ttft=2, tpot=0.05,stall=1") == Objective(ttft_s=2.0, tpot_s=0.05, stall_s=1.0)
    assert parse_objective("tpot=0.05") == Objective(tpot_s=0.05)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("ttft=0", "an objective of ttft=0 can't be met"),
        ("ttft=-1", "can't be met"),
        ("tpot=nan", "can't be met"),
        ("stall=soon", "can't be met"),
        ("itl=1", "'itl=1' is no part of an objective; it knows ttft, tpot, stall"),
        ("", "'' is no part"),
        ("ttft=1,ttft=2", "'ttft' twice"),
    ],
)
def test_objective_that_makes_no_sense_is_refused_with_the_reason(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_objective(text)
    assert said in refused.value.message
