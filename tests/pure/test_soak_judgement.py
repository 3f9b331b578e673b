"""What a request of a soak came to: every ending, and that a wrong one is found however the answer came."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from pdserve.bench.semantics.case import Case, Outcome
from pdserve.bench.soak.judgement import TRANSIENT_CODES, Cut, Ending, Received, judge, outcome_of

CASE = Case(name="a case", path="/v1/completions", body={"prompt": "a"})
DOC = Path(__file__).resolve().parents[2] / "docs" / "api.md"


def chunk(text: str, finish_reason: str | None = None, index: int = 0) -> dict[str, Any]:
    choice = {"index": index, "text": text, "logprobs": None, "finish_reason": finish_reason}
    return {"id": "x", "object": "text_completion", "choices": [choice], "usage": None}


def stream(*events: dict[str, Any] | str, cut: Cut | None = None) -> Received:
    text = "".join(f"data: {each if isinstance(each, str) else json.dumps(each)}\n\n" for each in events)
    return Received(status=200, is_stream=True, text=text, cut=cut)


def answer(text: str, *, status: int = 200, logprob: float = -0.5) -> Received:
    body = {"id": "y", "choices": [{"index": 0, "text": text, "logprobs": [logprob]}]}
    return Received(status=status, text=json.dumps(body))


def error(code: str, *, status: int = 503) -> Received:
    return Received(status=status, text=json.dumps(error_event(code)))


def error_event(code: str) -> dict[str, Any]:
    return {"error": {"message": "m", "type": "t", "param": None, "code": code}}


WHOLE = stream(chunk("ab"), chunk("cd", "stop"), "[DONE]")
STREAMED = outcome_of(WHOLE)
ANSWERED = outcome_of(answer("abcd"))
REFUSED = outcome_of(error("invalid_value", status=400))


@pytest.mark.parametrize(
    ("recorded", "received", "ending"),
    [
        (STREAMED, WHOLE, Ending.ANSWERED),
        (STREAMED, stream(chunk("a"), chunk("bcd"), chunk("", "stop"), "[DONE]"), Ending.ANSWERED),
        (STREAMED, stream(chunk("ab"), chunk("ce", "stop"), "[DONE]"), Ending.WRONG),
        (STREAMED, stream(chunk("ab"), chunk("cd", "length"), "[DONE]"), Ending.WRONG),
        (STREAMED, stream(chunk("ab"), chunk("cd", "stop")), Ending.WRONG),
        (STREAMED, stream(chunk("ab")), Ending.WRONG),
        (STREAMED, stream(), Ending.WRONG),
        (STREAMED, stream("[DONE]"), Ending.WRONG),
        (STREAMED, stream(chunk("ab"), error_event("worker_lost")), Ending.FAILED),
        (STREAMED, stream(chunk("xx"), error_event("worker_lost")), Ending.WRONG),
        (STREAMED, stream(error_event("worker_lost"), error_event("worker_lost")), Ending.WRONG),
        (STREAMED, stream(error_event("worker_lost"), "[DONE]"), Ending.WRONG),
        (STREAMED, stream(chunk("ab"), error_event("internal_error")), Ending.WRONG),
        (STREAMED, stream(chunk("ab"), cut=Cut.LEFT), Ending.LEFT),
        (STREAMED, stream(chunk("ac"), cut=Cut.LEFT), Ending.WRONG),
        (STREAMED, stream(cut=Cut.LEFT), Ending.LEFT),
        (STREAMED, Received(cut=Cut.LEFT), Ending.LEFT),
        (STREAMED, Received(cut=Cut.DEADLINE), Ending.HUNG),
        (STREAMED, stream(chunk("ab"), cut=Cut.DEADLINE), Ending.HUNG),
        (STREAMED, Received(cut=Cut.CONNECTION, note="reset"), Ending.WRONG),
        (ANSWERED, answer("abcd"), Ending.ANSWERED),
        (ANSWERED, answer("abcd", logprob=-0.500001), Ending.ANSWERED),
        (ANSWERED, answer("abcd", logprob=-0.501), Ending.WRONG),
        (ANSWERED, answer("abce"), Ending.WRONG),
        (ANSWERED, Received(status=200, text="no JSON"), Ending.WRONG),
        (ANSWERED, Received(status=200, text="{", cut=Cut.LEFT), Ending.LEFT),
        (ANSWERED, error("over_capacity", status=429), Ending.FAILED),
        (ANSWERED, error("invalid_value", status=400), Ending.WRONG),
        (ANSWERED, error("fabric_error", status=500), Ending.WRONG),
        (ANSWERED, Received(status=500, text="Internal Server Error"), Ending.WRONG),
        (REFUSED, error("invalid_value", status=400), Ending.REFUSED),
        (REFUSED, error("context_length_exceeded", status=400), Ending.WRONG),
        (REFUSED, answer("abcd"), Ending.WRONG),
    ],
)
def test_request_comes_to_the_ending_that_its_answer_shows(
    recorded: Outcome, received: Received, ending: Ending
) -> None:
    judgement = judge(CASE, recorded, received)
    assert judgement.ending is ending, judgement.problem
    assert (judgement.problem is not None) == (ending is Ending.WRONG)


@pytest.mark.parametrize("received", [Received(cut=Cut.CONNECTION, note="reset"), stream(chunk("ab")), stream()])
def test_answer_that_is_not_whole_can_not_be_recorded(received: Received) -> None:
    with pytest.raises(ValueError, match=r"no whole answer|no end"):
        outcome_of(received)


def test_errors_that_a_soak_allows_are_those_that_the_document_tells_clients_to_come_back_from() -> None:
    rows = re.findall(r"^\| (429|503[^|]*) \| ([^|]*) \|", DOC.read_text(encoding="utf-8"), re.MULTILINE)
    assert {code for _, codes in rows for code in re.findall(r"`(\w+)`", codes)} == TRANSIENT_CODES
