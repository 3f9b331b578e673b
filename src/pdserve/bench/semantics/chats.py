"""Cases of `POST /v1/chat/completions`."""

from typing import Any

from pdserve.bench.semantics.case import NUM_TOKENS, Case, Check
from pdserve.bench.semantics.checks import (
    all_of,
    calls_tool,
    ends_by,
    has_logprobs_of_each_token,
    num_choices_is,
    num_tokens_is,
    text_is_json,
    text_lacks,
)
from pdserve.bench.semantics.completions import PERSON_SCHEMA, Texts

PATH = "/v1/chat/completions"

_QUESTION = "Why is the sea salty? Answer in one sentence."

WEATHER_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather at a place.",
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string", "maxLength": 16}, "unit": {"enum": ["celsius", "fahrenheit"]}},
            "required": ["place", "unit"],
            "additionalProperties": False,
        },
    },
}

TIDE_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_tide",
        "description": "The tide of a day.",
        "parameters": {
            "type": "object",
            "properties": {"day": {"enum": ["today", "tomorrow"]}},
            "required": ["day"],
            "additionalProperties": False,
        },
    },
}


def chat_cases(texts: Texts) -> list[Case]:
    return [*_conversations(texts), *_sampling(texts), *_structured(), *_tools()]


def _case(name: str, messages: str | list[Any], check: Check | None = None, **fields: Any) -> Case:
    listed = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
    body = {"model": "default", "messages": listed, "max_tokens": NUM_TOKENS, "temperature": 0, **fields}
    return Case(name=f"chat: {name}", path=PATH, body=body, check=check)


def _conversations(texts: Texts) -> list[Case]:
    system = {"role": "system", "content": "You answer like an old sailor."}
    turns = [
        {"role": "user", "content": "Who are you?"},
        {"role": "assistant", "content": "A sailor."},
        {"role": "user", "content": "Where do you live?"},
    ]
    parts = [{"type": "text", "text": "Tell me about "}, {"type": "text", "text": "lighthouses."}]
    return [
        _case("greedy", _QUESTION, num_tokens_is(NUM_TOKENS)),
        _case("system message", [system, {"role": "user", "content": _QUESTION}]),
        _case("developer message", [{**system, "role": "developer"}, {"role": "user", "content": _QUESTION}]),
        _case("several turns", [system, *turns], max_tokens=24),
        _case("template variables, reasoning", _QUESTION, chat_template_kwargs={}, include_reasoning=True),
        _case("parts of text", [{"role": "user", "content": parts}]),
        _case("a long message", texts.long + "\n\nSum this up.", max_tokens=24),
        _case("max_completion_tokens wins", _QUESTION, num_tokens_is(5), max_completion_tokens=5),
        _case("one token", _QUESTION, all_of(num_tokens_is(1), ends_by("length")), max_tokens=1),
        _case("to the end of sequence", "Say yes.", max_tokens=200),
        _case(
            "continue_final_message",
            [*turns[:1], {"role": "assistant", "content": "I am an old"}],
            continue_final_message=True,
            add_generation_prompt=False,
        ),
    ]


def _sampling(texts: Texts) -> list[Case]:
    return [
        _case("seed", _QUESTION, temperature=1.0, seed=101, max_tokens=24),
        _case("stop", _QUESTION, text_lacks("."), stop=["."], max_tokens=48),
        _case("n=3", _QUESTION, num_choices_is(3, num_distinct=2), n=3, temperature=1.0, seed=102),
        _case(
            "n=3, logprobs", _QUESTION, num_choices_is(3), n=3, temperature=1.0, seed=103, logprobs=True, top_logprobs=2
        ),
        _case("logprobs", _QUESTION, logprobs=True, return_token_ids=True),
        _case("top_logprobs", _QUESTION, has_logprobs_of_each_token(num_top=4), logprobs=True, top_logprobs=4),
        _case(
            "penalties and bias",
            _QUESTION,
            presence_penalty=0.7,
            frequency_penalty=0.7,
            logit_bias={"28": -5},
            max_tokens=32,
        ),
        _case(
            "end of sequence first",
            _QUESTION,
            num_tokens_is(1),
            logit_bias={str(texts.eos_id): 100},
            stop_token_ids=[texts.eos_id],
        ),
    ]


def _structured() -> list[Case]:
    schema = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": PERSON_SCHEMA}}
    keys = ("name", "age", "is_sailor")
    return [
        _case("json_schema", "Describe a sailor.", text_is_json(keys), response_format=schema, max_tokens=64),
        _case(
            "json_schema, seed",
            "Describe a sailor.",
            text_is_json(keys),
            response_format=schema,
            max_tokens=64,
            temperature=1.0,
            seed=111,
            n=2,
        ),
        _case(
            "json_schema, logprobs",
            "Describe a sailor.",
            text_is_json(keys),
            response_format=schema,
            max_tokens=64,
            logprobs=True,
        ),
        _case("json_object", "Describe a sailor in JSON.", response_format={"type": "json_object"}, max_tokens=48),
        _case("text", "Describe a sailor.", response_format={"type": "text"}),
    ]


def _tools() -> list[Case]:
    tools = [WEATHER_TOOL, TIDE_TOOL]
    question = "What is the weather in Marlow?"
    named = {"type": "function", "function": {"name": "get_tide"}}
    call = {"id": "call_1", "type": "function", "function": {"name": "get_tide", "arguments": '{"day": "today"}'}}
    told = [
        {"role": "user", "content": "How is the tide?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "High at noon."},
    ]
    either = calls_tool("get_weather", "get_tide")
    return [
        _case("tools, auto", question, tools=tools, max_tokens=24),
        _case("tools, none", question, tools=tools, tool_choice="none"),
        _case("tools, required", question, either, tools=tools, tool_choice="required", max_tokens=96),
        _case("tools, named", question, calls_tool("get_tide"), tools=tools, tool_choice=named, max_tokens=96),
        _case(
            "tools, required, seed",
            question,
            either,
            tools=tools,
            tool_choice="required",
            max_tokens=96,
            temperature=1.0,
            seed=121,
        ),
        _case(
            "tools, one call",
            question,
            either,
            tools=tools,
            tool_choice="required",
            parallel_tool_calls=False,
            max_tokens=96,
        ),
        _case("tool results", told, tools=tools, max_tokens=24),
    ]
