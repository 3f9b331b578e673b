"""The battery of `verify-semantics`: what it covers, and that it finds differences."""

import json
from itertools import pairwise
from typing import Any

import msgspec
import pytest

from pdserve.bench.handoff_check import NATURAL_TEXT
from pdserve.bench.semantics.battery import battery
from pdserve.bench.semantics.case import Case, Outcome, problem_of
from pdserve.bench.semantics.checks import text_is_json
from pdserve.bench.semantics.comparison import differences
from pdserve.bench.semantics.completions import Texts
from pdserve.bench.semantics.streams import merge_completion, merge_response, whole_form
from pdserve.gateway.chat_request import ChatRequest
from pdserve.gateway.completion_request import CompletionRequest
from pdserve.gateway.responses_request import ResponsesRequest

TEXTS = Texts(
    short="A town lies by the sea.",
    medium="A hill.",
    long=NATURAL_TEXT.read_text(),
    short_ids=(5, 6, 7, 8, 9, 10),
    eos_id=0,
    word_id=260,
)

UNUSED = {
    "/v1/chat/completions": {"reasoning_effort", "user", "min_p", "min_tokens", "top_k", "top_p", "ignore_eos"}
    | {"repetition_penalty", "skip_special_tokens", "prompt_logprobs"}
    | {"guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs"},
    "/v1/completions": set[str](),
    "/v1/responses": {"user"},
}
"""Fields of an API that the battery has in the cases of another one, or in a refusal."""


def whole(text: str = "abc", **fields: Any) -> dict[str, Any]:
    return {
        "choices": [{"index": 0, "text": text, "logprobs": None, "finish_reason": "stop", **fields}],
        "usage": {"completion_tokens": 3},
    }


CASE = Case(name="a case", path="/v1/completions", body={"prompt": "x"})


def test_battery_has_each_name_once_and_enough_cases() -> None:
    names = [case.name for case in battery(TEXTS)]
    assert len(names) == len(set(names)) >= 60


@pytest.mark.parametrize(
    ("path", "request_type"),
    [
        ("/v1/chat/completions", ChatRequest),
        ("/v1/completions", CompletionRequest),
        ("/v1/responses", ResponsesRequest),
    ],
)
def test_battery_uses_every_field_of_an_api(path: str, request_type: type[msgspec.Struct]) -> None:
    used: set[str] = set()
    for case in battery(TEXTS):
        if case.path == path and isinstance(case.body, dict) and case.status == 200:
            used |= case.body.keys()
    assert {field.name for field in msgspec.structs.fields(request_type)} - used == UNUSED[path]


def test_stream_comes_right_after_the_whole_answer_that_it_must_equal() -> None:
    for before, case in pairwise(battery(TEXTS)):
        if case.streams and case.status == 200:
            assert isinstance(before.body, dict) and isinstance(case.body, dict)
            of_stream = ("stream", "stream_options")
            assert {name: case.body[name] for name in case.body if name not in of_stream} == before.body


def test_equal_answers_do_not_differ() -> None:
    outcome = Outcome(status=200, answer=whole())
    assert differences([CASE], {"one": [outcome], "other": [outcome]}) == []


@pytest.mark.parametrize("other", [whole("abx"), whole(token_ids=[1]), {**whole(), "usage": {"completion_tokens": 2}}])
def test_answer_that_differs_is_found(other: dict[str, Any]) -> None:
    outcomes = {"one": [Outcome(status=200, answer=whole())], "other": [Outcome(status=200, answer=other)]}
    (found,) = differences([CASE], outcomes)
    assert found.case_name == "a case" and "other differs from one" in found.what


def test_status_that_differs_from_the_expected_is_found_on_every_side() -> None:
    outcome = Outcome(status=500, answer={})
    assert len(differences([CASE], {"one": [outcome], "other": [outcome]})) == 2


def test_stream_that_differs_from_the_whole_answer_is_found() -> None:
    cases = [CASE, CASE.streamed()]
    outcomes = [Outcome(status=200, answer=whole()), Outcome(status=200, answer=whole("ab"))]
    (found,) = differences(cases, {"one": outcomes})
    assert found.case_name == "a case, streamed" and "the stream differs" in found.what


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"error": "no"},
        {"error": {"message": "m"}},
        {"error": {"message": "", "type": "", "param": "m", "code": ""}},
    ],
)
def test_refusal_without_the_body_or_the_field_is_found(answer: dict[str, Any]) -> None:
    case = Case(name="refused", path="/v1/completions", body={}, status=400, error_param="n")
    assert problem_of(case, Outcome(status=400, answer=answer)) is not None


def test_check_of_json_finds_other_text() -> None:
    check = text_is_json(("name",))
    assert check(whole('{"name": 1}')) is None
    assert check(whole('{"age": 1}')) is not None
    assert check(whole('{"name": 1')) is not None


def test_chunks_make_the_whole_answer() -> None:
    chunks: list[dict[str, Any]] = [
        {"choices": [{"index": 1, "text": "x", "token_ids": [4], "finish_reason": None}], "usage": None},
        {"choices": [{"index": 0, "text": "a", "logprobs": {"tokens": ["a"]}, "finish_reason": None}], "usage": None},
        {"choices": [{"index": 0, "text": "bc", "logprobs": {"tokens": ["b"]}, "finish_reason": "stop"}]},
        {"choices": [{"index": 1, "text": "", "token_ids": [], "finish_reason": "length"}]},
        {"choices": [], "usage": {"completion_tokens": 3}},
    ]
    first, second = merge_completion(chunks)["choices"]
    assert first == {"index": 0, "text": "abc", "logprobs": {"tokens": ["a", "b"]}, "finish_reason": "stop"}
    assert second == {"index": 1, "text": "x", "token_ids": [4], "finish_reason": "length"}


def test_chunk_after_the_end_of_a_choice_is_not_forgotten() -> None:
    ended = {"choices": [{"index": 0, "text": "a", "finish_reason": "stop"}]}
    late = {"choices": [{"index": 0, "text": "", "finish_reason": "stop"}]}
    merged = merge_completion([ended, late])
    assert whole_form(merged) != whole_form(whole("a"))


def test_tool_calls_in_pieces_make_the_whole_calls() -> None:
    begun = {"index": 0, "id": "c", "type": "function", "function": {"name": "f", "arguments": ""}}
    pieces: list[dict[str, Any]] = [
        {"role": "assistant"},
        {"tool_calls": [begun]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"a"'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": ": 1}"}}]},
    ]
    chunks = [{"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in pieces]
    (choice,) = merge_completion(chunks)["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert call == {"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}


def test_events_of_a_response_are_told_by_their_order_and_texts() -> None:
    events = [
        {"type": "response.created"},
        {"type": "response.output_text.delta", "delta": "a"},
        {"type": "response.output_text.delta", "delta": "b"},
        {"type": "response.completed", "response": {"status": "completed"}},
    ]
    merged = merge_response(events)
    assert merged["texts"] == {"response.output_text.delta": "ab"}
    assert merged["order"] == ["response.created", "response.output_text.delta", "response.completed"]
    assert json.dumps(merged["response"]) == '{"status": "completed"}'
