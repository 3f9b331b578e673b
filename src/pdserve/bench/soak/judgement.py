"""What one request came to, compared with its undisturbed answer. Pure."""

import json
import math
from dataclasses import dataclass
from enum import Enum
from typing import Any, cast

from pdserve.bench.semantics.case import Case, Json, Outcome
from pdserve.bench.semantics.comparison import first_difference
from pdserve.bench.semantics.sender import without_volatile
from pdserve.bench.semantics.streams import merge_completion

TRANSIENT_CODES = frozenset(
    {"over_capacity", "client_too_slow", "no_worker", "worker_lost", "shutting_down", "timeout"}
)
"""What a request that is fit to be answered may be told instead while workers die; `docs/api.md`, Errors."""

LOGPROB_TOLERANCE = 1e-4
"""Models on torch's kernels add up in an order that depends on the batch. Tokens and texts must be the same."""

_ERROR_KEYS = {"message", "type", "param", "code"}


class Cut(Enum):
    """How a client stopped reading before the end."""

    LEFT = "left"
    """It went away."""
    DEADLINE = "deadline"
    CONNECTION = "connection"
    """The server or the network ended it."""


class Ending(Enum):
    """Each request has one."""

    ANSWERED = "answered"
    REFUSED = "refused"
    """By a fault of its own, as it must be."""
    FAILED = "failed"
    """With an error that says to come back."""
    LEFT = "left"
    """The client went away first."""
    WRONG = "wrong"
    HUNG = "hung"


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """What a client got."""

    status: int | None = None
    """None: no response came."""
    is_stream: bool = False
    text: str = ""
    cut: Cut | None = None
    """None: read to its end."""
    note: str = ""
    """Of a cut connection: what the client library says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    ending: Ending
    code: str | None = None
    """Of the error, where there was one."""
    problem: str | None = None
    """Of a wrong one."""


def judge(case: Case, recorded: Outcome, received: Received) -> Judgement:
    """`recorded` is what the case came to when nothing was disturbed."""
    match received.cut:
        case Cut.DEADLINE:
            return Judgement(ending=Ending.HUNG)
        case Cut.CONNECTION:
            return _wrong(f"the connection was cut: {received.note}")
        case Cut.LEFT | None:
            pass
    try:
        if received.status is None or (received.cut is Cut.LEFT and not received.is_stream):
            return Judgement(ending=Ending.LEFT)
        if received.status != 200:
            return _judge_error(recorded, received.status, json.loads(received.text))
        if received.is_stream:
            return _judge_stream(recorded, received)
        return _judge_answer(recorded, json.loads(received.text))
    except (ValueError, KeyError, TypeError) as error:
        return _wrong(f"{type(error).__name__}: {error} in {received.text[-300:]!r}")


def outcome_of(received: Received) -> Outcome:
    """Of an answer that was read to its end, to compare later ones with. Raises: `ValueError` when it was not."""
    if received.status is None or received.cut is not None:
        raise ValueError(f"no whole answer: {received.note or received.cut}")
    if not received.is_stream:
        return Outcome(status=received.status, answer=without_volatile(json.loads(received.text)))
    events = _events(received.text)
    if not events or events.pop() != "[DONE]":
        raise ValueError(f"the stream has no end: {received.text[-300:]!r}")
    return Outcome(status=received.status, answer=_merged(events))


def _judge_error(recorded: Outcome, status: int, body: Json) -> Judgement:
    error = _error_in(body)
    if (status, without_volatile(body)) == (recorded.status, recorded.answer):
        return Judgement(ending=Ending.REFUSED, code=error["code"])
    if error["code"] in TRANSIENT_CODES and recorded.status == 200:
        return Judgement(ending=Ending.FAILED, code=error["code"])
    return _wrong(f"status {status} {error} instead of status {recorded.status}", code=error["code"])


def _judge_stream(recorded: Outcome, received: Received) -> Judgement:
    events = _events(received.text)
    if received.cut is Cut.LEFT:
        return _judge_beginning(recorded, events)
    if not events:
        return _wrong("an empty stream")
    last = events.pop()
    if last != "[DONE]":
        error = _error_in(json.loads(last))
        if any("error" in json.loads(event) for event in events):
            return _wrong("a stream with two errors", code=error["code"])
        if error["code"] not in TRANSIENT_CODES:
            return _wrong(f"the stream ended with {error}", code=error["code"])
        beginning = _judge_beginning(recorded, events)
        return beginning if beginning.problem else Judgement(ending=Ending.FAILED, code=error["code"])
    return _compared(recorded, _merged(events))


def _judge_beginning(recorded: Outcome, events: list[str]) -> Judgement:
    """The texts of a stream that was left must be beginnings of the recorded ones."""
    if "[DONE]" in events:
        return _compared(recorded, _merged([event for event in events if event != "[DONE]"]))
    if not events:
        return Judgement(ending=Ending.LEFT)
    merged = _merged(events)
    if "error" in merged:
        code = _error_in(merged)["code"]
        return Judgement(ending=Ending.FAILED, code=code) if code in TRANSIENT_CODES else _wrong(str(merged), code=code)
    whole = {choice["index"]: _text(choice) for choice in recorded.answer["choices"]}
    for choice in merged["choices"]:
        if not whole[choice["index"]].startswith(_text(choice)):
            return _wrong(f"choice {choice['index']} began {_text(choice)!r}, not {whole[choice['index']]!r}")
    return Judgement(ending=Ending.LEFT)


def _judge_answer(recorded: Outcome, answer: Json) -> Judgement:
    return _compared(recorded, without_volatile(answer))


def _compared(recorded: Outcome, answer: Json) -> Judgement:
    if recorded.status == 200 and _is_close(answer, recorded.answer):
        return Judgement(ending=Ending.ANSWERED)
    return _wrong(f"answered, undisturbed {recorded.status}: {first_difference(answer, recorded.answer)}")


def _is_close(ours: object, theirs: object) -> bool:
    """Equal but for the last digits of numbers that are not whole."""
    match ours, theirs:
        case float(), float():
            return math.isclose(ours, theirs, rel_tol=0, abs_tol=LOGPROB_TOLERANCE)
        case dict(), dict():
            our_items, their_items = cast(Json, ours), cast(Json, theirs)
            return our_items.keys() == their_items.keys() and all(
                _is_close(value, their_items[key]) for key, value in our_items.items()
            )
        case list(), list():
            our_list, their_list = cast("list[object]", ours), cast("list[object]", theirs)
            return len(our_list) == len(their_list) and all(map(_is_close, our_list, their_list))
        case _:
            return ours == theirs


def _wrong(problem: str, *, code: str | None = None) -> Judgement:
    return Judgement(ending=Ending.WRONG, code=code, problem=problem)


def _events(text: str) -> list[str]:
    """Whole ones: what a client that left had of the last one is none."""
    return [event.removeprefix("data: ") for event in text.split("\n\n")[:-1]]


def _merged(events: list[str]) -> Json:
    """Raises: `ValueError` when there is nothing to put together."""
    if not events:
        raise ValueError("no event but the end")
    return without_volatile(merge_completion([json.loads(event) for event in events]))


def _text(choice: Json) -> str:
    return choice.get("text") or choice.get("message", {}).get("content") or ""


def _error_in(body: Json) -> Json:
    """Raises: `ValueError` when it is no OpenAI error body."""
    error: Any = body.get("error")
    if not isinstance(error, dict) or cast(Json, error).keys() != _ERROR_KEYS:
        raise ValueError(f"no OpenAI error body: {str(body)[:300]}")
    return cast(Json, error)
