"""Bodies of `/v1/responses`, `/tokenize` and `/detokenize`: requests, or a `RequestError` that names a field."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.errors import InvalidField, RequestError, UnsupportedField
from pdserve.gateway.fields import NoOps
from pdserve.gateway.responses_request import RESPONSES_NO_OPS, ResponsesRequest, parse_responses_request
from pdserve.gateway.token_requests import (
    CHAT_NO_OPS,
    TEXT_NO_OPS,
    DetokenizeRequest,
    TokenizeText,
    parse_detokenize_request,
    parse_tokenize_request,
)

PARSERS: list[tuple[Callable[[bytes], object], dict[str, Any]]] = [
    (parse_responses_request, {"model": "m", "input": "x"}),
    (parse_tokenize_request, {"prompt": "x"}),
    (parse_tokenize_request, {"messages": [{"role": "user", "content": "x"}]}),
    (parse_detokenize_request, {"tokens": [1]}),
]

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=8), children, max_size=3),
    max_leaves=8,
)
field_names = st.sampled_from(
    [
        *ResponsesRequest.__struct_fields__,
        *RESPONSES_NO_OPS,
        *TokenizeText.__struct_fields__,
        *CHAT_NO_OPS,
        *DetokenizeRequest.__struct_fields__,
        "messages",
        "add_generation_prompt",
    ]
)
PART: dict[str, st.SearchStrategy[Any]] = {"type": st.sampled_from(["input_text", "x"]), "text": json_values}
ITEM: dict[str, st.SearchStrategy[Any]] = {
    "role": st.sampled_from(["user", "assistant", "king"]),
    "type": st.sampled_from(["message", "item_reference"]) | json_values,
    "content": st.text(max_size=8) | st.lists(st.fixed_dictionaries(PART) | json_values, max_size=2),
}
REQUIRED = ("role", "content")
items: st.SearchStrategy[Any] = st.fixed_dictionaries(
    {name: ITEM[name] for name in REQUIRED}, optional={name: ITEM[name] for name in ITEM if name not in REQUIRED}
)


@given(body=st.binary(max_size=200) | json_values.map(lambda value: json.dumps(value).encode()))
def test_any_bytes_are_a_request_or_a_request_error(body: bytes) -> None:
    for parse, _ in PARSERS:
        try:
            parse(body)
        except RequestError as error:
            assert error.message


@given(fields=st.dictionaries(field_names | st.text(min_size=1, max_size=8), json_values, max_size=4))
def test_any_fields_are_refused_by_the_name_of_one_of_them(fields: dict[str, Any]) -> None:
    for parse, required in PARSERS:
        body = {**required, **fields}
        try:
            parse(json.dumps(body).encode())
        except RequestError as error:
            assert error.param is not None
            named = error.param.split(".")[0].split("[")[0]
            assert any(name.startswith(named) for name in body)


@given(items=st.lists(items | json_values, max_size=3))
def test_any_input_items_are_messages_or_are_refused_by_name(items: list[Any]) -> None:
    try:
        request = parse_responses_request(json.dumps({"model": "m", "input": items}).encode())
    except RequestError as error:
        assert error.param is not None and error.param.startswith("input")
    else:
        assert len(request.messages) == len(items)


def test_earlier_reasoning_is_taken_and_is_no_part_of_the_conversation() -> None:
    reasoning = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "r"}]}
    answer = {"role": "assistant", "content": [{"type": "output_text", "text": "a", "logprobs": [{"token": "a"}]}]}
    items = [{"role": "user", "content": "q"}, reasoning, answer]
    request = parse_responses_request(json.dumps({"model": "m", "input": items}).encode())
    assert [message.text for message in request.messages] == ["q", "a"]
    with pytest.raises(InvalidField) as caught:
        parse_responses_request(json.dumps({"model": "m", "input": [reasoning]}).encode())
    assert caught.value.param == "input"


@pytest.mark.parametrize(
    ("parse", "required", "no_ops"),
    [
        (parse_responses_request, PARSERS[0][1], RESPONSES_NO_OPS),
        (parse_tokenize_request, PARSERS[1][1], TEXT_NO_OPS),
        (parse_tokenize_request, PARSERS[2][1], CHAT_NO_OPS),
    ],
)
def test_known_fields_that_ask_for_nothing_are_taken_and_others_refused(
    parse: Callable[[bytes], object], required: dict[str, Any], no_ops: NoOps
) -> None:
    for name, values in no_ops.items():
        for value in (None, *values):
            parse(json.dumps({**required, name: value}).encode())
        with pytest.raises(UnsupportedField) as caught:
            parse(json.dumps({**required, name: "something else"}).encode())
        assert caught.value.param == name
