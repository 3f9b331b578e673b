"""Bodies: whatever comes in, it is a request or a `RequestError` that names a field."""

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pdserve.errors import ContextOverflow, InvalidField, RequestError, UnsupportedField
from pdserve.gateway.chat_request import CHAT_NO_OPS, ChatRequest, parse_chat_request
from pdserve.gateway.completion_request import COMPLETION_NO_OPS, CompletionRequest, parse_completion_request
from pdserve.gateway.fields import NoOps
from pdserve.gateway.sampling_fields import sampling_params
from pdserve.sampling import SamplingParams

MESSAGES = [{"role": "user", "content": "x"}]


def chat(**fields: Any) -> ChatRequest:
    return parse_chat_request(json.dumps({"model": "m", "messages": MESSAGES, **fields}).encode())


def completion(**fields: Any) -> CompletionRequest:
    return parse_completion_request(json.dumps({"model": "m", "prompt": "x", **fields}).encode())


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=8), children, max_size=3),
    max_leaves=8,
)
field_names = st.sampled_from([*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__, *CHAT_NO_OPS])


@given(body=st.binary(max_size=200) | json_values.map(lambda value: json.dumps(value).encode()))
def test_parse_any_bytes_gives_a_request_or_a_request_error(body: bytes) -> None:
    for parse in (parse_chat_request, parse_completion_request):
        try:
            parse(body)
        except RequestError as error:
            assert error.message


@given(fields=st.dictionaries(field_names | st.text(min_size=1, max_size=8), json_values, max_size=4))
@example(fields={"`": None})
def test_parse_any_fields_refuses_by_the_name_of_one_of_them(fields: dict[str, Any]) -> None:
    for parse in (chat, completion):
        try:
            parse(**fields)
        except RequestError as error:
            assert error.param is not None
            named = error.param.split(".")[0].split("[")[0]
            assert named in fields or any(name.startswith(named) for name in fields)


@given(fields=st.fixed_dictionaries({}, optional={"temperature": st.floats(0, 2), "top_p": st.floats(0.01, 1)}))
def test_parse_values_in_range_reach_the_sampler(fields: dict[str, float]) -> None:
    params = sampling_params(
        chat(**fields), num_prompt_tokens=1, max_model_len=10, default_max_tokens=None, prompt_param="messages"
    )
    assert params.temperature == pytest.approx(fields.get("temperature", 1.0), abs=1e-4)
    assert params.top_p == fields.get("top_p", 1.0)
    assert (params.seed is None) == (params.temperature == 0)


@pytest.mark.parametrize(("no_ops", "parse"), [(CHAT_NO_OPS, chat), (COMPLETION_NO_OPS, completion)])
def test_unsupported_field_with_a_value_that_asks_for_nothing_is_accepted(no_ops: NoOps, parse: Any) -> None:
    for name, values in no_ops.items():
        for value in (None, *values):
            parse(**{name: value})


@pytest.mark.parametrize(("no_ops", "parse"), [(CHAT_NO_OPS, chat), (COMPLETION_NO_OPS, completion)])
def test_unsupported_field_that_asks_for_something_is_refused_by_name(no_ops: NoOps, parse: Any) -> None:
    for name in no_ops:
        with pytest.raises(UnsupportedField) as raised:
            parse(**{name: {"something": "else"}})
        assert raised.value.param == name


def test_unsupported_field_tells_zero_from_false() -> None:
    completion(store=False)
    with pytest.raises(UnsupportedField):
        completion(store=0)
    with pytest.raises(UnsupportedField):
        chat(priority=False)


@pytest.mark.parametrize(
    ("field", "below", "lowest", "highest", "above"),
    [
        ("temperature", -0.01, 0, 2, 2.01),
        ("top_p", 0, 0.01, 1, 1.01),
        ("top_k", -2, -1, 2**31 - 1, 2**31),
        ("min_p", -0.01, 0, 1, 1.01),
        ("min_tokens", -1, 0, 10**6, None),
        ("top_logprobs", -1, 0, 20, 21),
        ("presence_penalty", -2.01, -2, 2, 2.01),
        ("frequency_penalty", -2.01, -2, 2, 2.01),
        ("repetition_penalty", 0, 0.01, 10, 10.01),
        ("max_tokens", 0, 1, 10**6, None),
        ("max_completion_tokens", 0, 1, 10**6, None),
        ("n", 0, 1, 128, 129),
        ("prompt_logprobs", -1, 0, 20, 21),
        ("seed", -(2**63) - 1, -(2**63), 2**63 - 1, 2**63),
    ],
)
def test_number_at_its_bounds_is_accepted_and_beyond_refused(
    field: str, below: float, lowest: float, highest: float, above: float | None
) -> None:
    needed = {"logprobs": True} if field == "top_logprobs" else {}
    chat(**{field: lowest}, **needed)
    chat(**{field: highest}, **needed)
    for value in (below, above, "1", True, [1]):
        if value is not None:
            with pytest.raises(InvalidField) as raised:
                chat(**{field: value}, **needed)
            assert raised.value.param == field


@pytest.mark.parametrize("stop", ["", [""], ["a"] * 5, 3, {"a": 1}])
def test_stop_that_is_not_up_to_four_texts_is_refused(stop: object) -> None:
    with pytest.raises(InvalidField) as raised:
        chat(stop=stop)
    assert raised.value.param is not None and raised.value.param.startswith("stop")


def sampling(request: ChatRequest, *, max_model_len: int = 10) -> SamplingParams:
    return sampling_params(
        request, num_prompt_tokens=1, max_model_len=max_model_len, default_max_tokens=None, prompt_param="messages"
    )


WRONG_BIASES: list[Any] = [
    {"x": 1},
    {"-1": 1},
    {"01": 1},
    {"\u0661": 1},
    {"": 1},
    {"5": 100.5},
    {"5": -101},
    {"5": "1"},
    {str(token_id): 0 for token_id in range(301)},
    [1],
    1,
]


@pytest.mark.parametrize("bias", WRONG_BIASES)
def test_logit_bias_that_is_no_map_of_tokens_to_biases_is_refused(bias: object) -> None:
    with pytest.raises(InvalidField) as raised:
        sampling(chat(logit_bias=bias))
    assert raised.value.param is not None and raised.value.param.split("[")[0] == "logit_bias"


def test_logit_bias_up_to_its_bounds_reaches_the_sampler() -> None:
    bias = {str(token_id): (-100, 100)[token_id % 2] for token_id in range(300)}
    assert dict(sampling(chat(logit_bias=bias)).logit_bias) == {int(key): value for key, value in bias.items()}


def test_min_tokens_over_max_tokens_is_refused_by_its_name() -> None:
    assert sampling(chat(min_tokens=5, max_tokens=5)).min_tokens == 5
    for fields in ({"max_tokens": 4}, {}):
        with pytest.raises(InvalidField) as raised:
            sampling(chat(min_tokens=5, **fields), max_model_len=5)
        assert raised.value.param == "min_tokens"


@pytest.mark.parametrize(
    ("fields", "num_top"),
    [
        ({}, None),
        ({"logprobs": False, "top_logprobs": 0}, None),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 20}, 20),
    ],
)
def test_chat_logprobs_reach_the_sampler(fields: dict[str, Any], num_top: int | None) -> None:
    assert sampling(chat(**fields)).num_top_logprobs == num_top


def test_chat_top_logprobs_without_logprobs_are_refused() -> None:
    for fields in ({"top_logprobs": 1}, {"top_logprobs": 1, "logprobs": False}):
        with pytest.raises(InvalidField) as raised:
            chat(**fields)
        assert raised.value.param == "top_logprobs"


def test_completion_logprobs_are_zero_to_five() -> None:
    assert [completion(logprobs=asked).num_top_logprobs for asked in (None, 0, 5)] == [None, 0, 5]
    for wrong in (-1, 6, True, "1"):
        with pytest.raises(InvalidField) as raised:
            completion(logprobs=wrong)
        assert raised.value.param == "logprobs"


CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"b": 1}'}}

WRONG_MESSAGES: list[tuple[Any, str]] = [
    ({"role": "user"}, "messages[0].content"),
    ({"role": "user", "content": None}, "messages[0].content"),
    ({"role": "robot", "content": "x"}, "messages[0].role"),
    ({"role": "user", "content": "x", "mood": 1}, "messages[0].mood"),
    ({"role": "user", "content": "x", "name": 1}, "messages[0].name"),
    ({"role": "user", "content": "x", "function_call": {}}, "messages[0].function_call"),
    ({"role": "assistant", "content": None}, "messages[0].content"),
    ({"role": "assistant", "content": "x", "tool_calls": [{}]}, "messages[0].tool_calls[0].id"),
    ({"role": "user", "content": "x", "tool_calls": [CALL]}, "messages[0].tool_calls"),
    ({"role": "user", "content": "x", "reasoning_content": "y"}, "messages[0].reasoning_content"),
    ({"role": "user", "content": "x", "tool_call_id": "a"}, "messages[0].tool_call_id"),
    ({"role": "tool", "content": "x"}, "messages[0].tool_call_id"),
    ({"role": "tool", "tool_call_id": "a"}, "messages[0].content"),
    *(
        (
            {"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "f", "arguments": arguments}}]},
            "messages[0].tool_calls[0].function.arguments",
        )
        for arguments in ("{", "[]", "1")
    ),
    ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text"),
    ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "messages[0].content[0].type"),
    ("x", "messages[0]"),
]


@pytest.mark.parametrize(("message", "param"), WRONG_MESSAGES)
def test_message_that_is_wrong_is_refused_by_its_place(message: object, param: str) -> None:
    with pytest.raises(RequestError) as raised:
        chat(messages=[message])
    assert raised.value.param == param


def test_message_of_an_earlier_answer_can_be_sent_back() -> None:
    answer = {"role": "assistant", "content": "x"}
    nothing: dict[str, Any] = {"refusal": None, "tool_calls": None, "annotations": []}
    assert chat(messages=[*MESSAGES, {**answer, **nothing}]).messages[1].as_template_input == answer


def test_message_of_a_developer_and_of_parts_is_what_templates_know() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert chat(messages=[{"role": "developer", "content": parts}]).messages[0].as_template_input == {
        "role": "system",
        "content": "ab",
    }


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("x", ["x"]),
        (["x"], ["x"]),
        (["x", "y"], ["x", "y"]),
        ([1, 2], [[1, 2]]),
        ([[1, 2]], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
    ],
)
def test_prompt_in_each_form_is_a_list_of_prompts(prompt: object, prompts: list[object]) -> None:
    assert completion(prompt=prompt).prompts == prompts


@pytest.mark.parametrize("prompt", ["", [], [""], [[]], ["a", ""], [[1], []], [1, "a"], ["a", [1]], [1, [1]]])
def test_prompt_that_is_empty_or_of_several_kinds_is_refused(prompt: object) -> None:
    with pytest.raises(InvalidField) as raised:
        _ = completion(prompt=prompt).prompts
    assert raised.value.param == "prompt"


@pytest.mark.parametrize(
    ("num_prompts", "n", "fits"), [(64, 2, True), (65, 1, False), (64, 3, False), (1, 128, True), (2, 65, False)]
)
def test_prompts_and_answers_are_bounded_together(num_prompts: int, n: int, fits: bool) -> None:
    for field in ("n", "best_of"):
        request = completion(prompt=["x"] * num_prompts, **{field: n})
        if fits:
            assert len(request.prompts) == num_prompts
        else:
            with pytest.raises(InvalidField) as raised:
                _ = request.prompts
            assert raised.value.param == "prompt"


@pytest.mark.parametrize(
    ("fields", "num_top", "num_prompt"),
    [
        ({}, None, None),
        ({"logprobs": 2}, 2, None),
        ({"echo": True}, None, None),
        ({"echo": True, "logprobs": 2}, 2, 2),
        ({"echo": True, "logprobs": 2, "prompt_logprobs": 1}, 2, 2),
        ({"echo": False, "logprobs": 2, "prompt_logprobs": 0}, 2, 0),
        ({"best_of": 1}, None, None),
        ({"best_of": 2}, 0, None),
        ({"best_of": 2, "n": 2}, None, None),
        ({"best_of": 2, "logprobs": 1, "echo": True}, 1, 1),
    ],
)
def test_completion_asks_the_sampler_for_the_logprobs_that_it_needs(
    fields: dict[str, Any], num_top: int | None, num_prompt: int | None
) -> None:
    request = completion(**fields)
    assert (request.num_top_logprobs, request.num_prompt_logprobs) == (num_top, num_prompt)


@given(
    num_prompt_tokens=st.integers(1, 20),
    max_tokens=st.none() | st.integers(1, 20),
    default_max_tokens=st.none() | st.just(4),
)
def test_max_tokens_is_what_fits_the_context_or_an_overflow(
    num_prompt_tokens: int, max_tokens: int | None, default_max_tokens: int | None
) -> None:
    room = 16 - num_prompt_tokens
    fits = room >= 1 and (max_tokens is None or max_tokens <= room)
    try:
        params = sampling_params(
            chat(max_tokens=max_tokens),
            num_prompt_tokens=num_prompt_tokens,
            max_model_len=16,
            default_max_tokens=default_max_tokens,
            prompt_param="messages",
        )
    except ContextOverflow as error:
        assert not fits
        assert error.param == ("messages" if room < 1 else "max_tokens")
        return
    assert fits
    default = room if default_max_tokens is None else min(room, default_max_tokens)
    assert params.max_tokens == (max_tokens or default)
