"""How chats are put to models of different families, and how their answers are read and forced."""

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from tests.pure.chat_models import DEEPSEEK, LLAMA, MISTRAL, PLAIN, QWEN, ByteTokenizer

from pdserve.errors import ConfigError, InvalidField, RequestError, UnsupportedField
from pdserve.gateway.chat_parser import ChatPiece, ContentPiece, ReasoningPiece, ToolArguments, ToolCallStart
from pdserve.gateway.formats import deepseek
from pdserve.gateway.formats.parser_choice import ReasoningParserChoice, ToolParserChoice
from pdserve.gateway.prompt import Prompt, PromptReader
from pdserve.gateway.served_model import ServedModel

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
USER = {"role": "user", "content": "Hi"}
PARIS = '{"city":"Paris"}'
CALL = {"id": "c0", "type": "function", "function": {"name": "weather", "arguments": PARIS}}
ASKED = [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}]
ANSWERED = [*ASKED, {"role": "tool", "tool_call_id": "c0", "content": "rain"}]

FAMILIES = {"hermes": QWEN, "llama3": LLAMA, "deepseek_v3": DEEPSEEK}
CALLS = {
    "hermes": '<tool_call>\n{"name": "weather", "arguments": %s}\n</tool_call>',
    "llama3": '{"name": "weather", "parameters": %s}',
    "deepseek_v3": (
        f"{deepseek.CALLS_BEGIN}{deepseek.CALL_BEGIN}function{deepseek.SEPARATOR}weather\n"
        f"```json\n%s\n```{deepseek.CALL_END}{deepseek.CALLS_END}"
    ),
    "deepseek_v31": (
        f"{deepseek.CALLS_BEGIN}{deepseek.CALL_BEGIN}weather{deepseek.SEPARATOR}%s"
        f"{deepseek.CALL_END}{deepseek.CALLS_END}"
    ),
}


async def chat(
    template: str | None,
    *,
    tool_parser: str = "auto",
    reasoning_parser: str = "auto",
    special_tokens: tuple[str, ...] = (),
    **fields: Any,
) -> Prompt:
    model = ServedModel(
        ByteTokenizer(template, special_tokens),
        name="smol",
        tool_parser=ToolParserChoice(tool_parser),
        reasoning_parser=ReasoningParserChoice(reasoning_parser),
    )
    body = {"model": "smol", "messages": [USER], **fields}
    return await PromptReader(model).chat(json.dumps(body).encode())


def text_of(prompt: Prompt) -> str:
    return bytes(prompt.token_ids).decode()


def read(prompt: Prompt, text: str) -> list[ChatPiece]:
    """Without the ids of calls."""
    parser = prompt.make_parser()
    pieces = [*parser.feed(text), *parser.finish()]
    return [
        ToolCallStart(piece.index, "", piece.name) if isinstance(piece, ToolCallStart) else piece for piece in pieces
    ]


def matches(prompt: Prompt, text: str) -> bool:
    assert prompt.grammar is not None
    matcher = LLMatcher(LLTokenizer("byte"), prompt.grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher.try_consume_tokens(list(text.encode())) == len(text.encode()) and matcher.is_accepting()


async def test_template_gets_tools_as_they_were_sent() -> None:
    text = text_of(await chat(QWEN, tools=[WEATHER]))
    assert json.dumps(WEATHER) in text
    assert "Tools:" not in text_of(await chat(QWEN))
    assert "Tools:" not in text_of(await chat(QWEN, tools=[WEATHER], tool_choice="none"))


@pytest.mark.parametrize("family", FAMILIES)
async def test_template_gets_earlier_calls_and_their_answers(family: str) -> None:
    text = text_of(await chat(FAMILIES[family], messages=ANSWERED, tools=[WEATHER]))
    assert '{"city": "Paris"}' in text
    assert "rain" in text
    assert text_of(await chat(FAMILIES[family], messages=ANSWERED))


@pytest.mark.parametrize("family", CALLS)
async def test_calls_are_read_in_the_format_that_the_template_has(family: str) -> None:
    template = FAMILIES.get(family, DEEPSEEK.replace("```json", "```"))
    prompt = await chat(template, tools=[WEATHER], reasoning_parser="none")
    assert read(prompt, CALLS[family] % PARIS) == [ToolCallStart(0, "", "weather"), ToolArguments(0, PARIS)]


@pytest.mark.parametrize("family", CALLS)
async def test_forced_calls_match_a_grammar_of_the_format(family: str) -> None:
    for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
        prompt = await chat(QWEN, tool_parser=family, tools=[WEATHER], tool_choice=choice, reasoning_parser="none")
        assert matches(prompt, CALLS[family] % PARIS)
        assert not matches(prompt, CALLS[family] % '{"town":"Paris"}')
        assert not matches(prompt, "Hello")


async def test_required_may_be_any_tool_and_named_is_that_one() -> None:
    now = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    weather = CALLS["hermes"] % PARIS
    required = await chat(PLAIN, tools=[WEATHER, NOW], tool_choice="required")
    assert matches(required, now)
    assert matches(required, f"{now}\n{weather}")
    single = await chat(PLAIN, tools=[WEATHER, NOW], tool_choice="required", parallel_tool_calls=False)
    assert matches(single, weather)
    assert not matches(single, f"{now}\n{weather}")
    named = await chat(PLAIN, tools=[WEATHER, NOW], tool_choice={"type": "function", "function": {"name": "now"}})
    assert matches(named, now)
    assert not matches(named, weather)


async def test_chosen_calls_are_free_and_one_where_only_one_is_wanted() -> None:
    prompt = await chat(QWEN, tools=[WEATHER], parallel_tool_calls=False)
    assert prompt.grammar is None
    assert read(prompt, CALLS["hermes"] % "{}" + CALLS["hermes"] % PARIS) == [
        ToolCallStart(0, "", "weather"),
        ToolArguments(0, "{}"),
    ]


async def test_structure_is_of_content_and_calls_stay_possible() -> None:
    prompt = await chat(PLAIN, tools=[WEATHER], guided_choice=["yes"])
    assert matches(prompt, "yes")
    assert matches(prompt, CALLS["hermes"] % PARIS)
    assert not matches(prompt, "no")


async def test_template_without_tools_has_them_described_in_the_system_message() -> None:
    system = {"role": "system", "content": "Be brief."}
    text = text_of(await chat(PLAIN, messages=[system, *ANSWERED], tools=[WEATHER]))
    assert text.startswith("<|system|>You can call functions.")
    assert json.dumps(WEATHER["function"]) in text
    assert "Be brief.<|user|>Hi" in text
    assert text.endswith(
        '<|assistant|><tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
        "<|user|><tool_response>\nrain\n</tool_response>"
    )


@pytest.mark.parametrize(
    ("template", "fields"), [(MISTRAL, {}), (QWEN, {"tool_parser": "none"}), ("<tool_call><function={{ tools }}", {})]
)
async def test_tools_of_a_model_whose_calls_can_not_be_read_are_refused(template: str, fields: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedField) as raised:
        await chat(template, tools=[WEATHER], **fields)
    assert raised.value.param == "tools"
    assert text_of(await chat(template, tools=[WEATHER], tool_choice="none", **fields))


async def test_format_that_goes_with_no_template_without_tools_is_refused_at_the_start() -> None:
    with pytest.raises(ConfigError, match="--tool-parser llama3 needs a chat template that has tools"):
        await chat(PLAIN, tool_parser="llama3")


SCHEMA_PARAM = "tools[0].function.parameters"


def tool(**function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **function}}


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"tools": [tool(name="f g")]}, "tools[0].function.name"),
    ({"tools": [tool(name="")]}, "tools[0].function.name"),
    ({"tools": [NOW, NOW]}, "tools[1].function.name"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [tool(schema={})]}, "tools[0].function.schema"),
    ({"tools": [tool(parameters={"type": "array"})]}, f"{SCHEMA_PARAM}.type"),
    (
        {"tools": [tool(parameters={"properties": {"a": {"type": "text"}}})], "tool_choice": "required"},
        f"{SCHEMA_PARAM}.properties.a.type",
    ),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [NOW], "tool_choice": "sometimes"}, "tool_choice"),
    (
        {"tools": [NOW], "tool_choice": {"type": "function", "function": {"name": "g"}}},
        "tool_choice.function.name",
    ),
    ({"tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice.function.name"),
    ({"chat_template_kwargs": {"mood": 1}}, "chat_template_kwargs.mood"),
    ({"chat_template_kwargs": {"tools": "x"}}, "chat_template_kwargs.tools"),
    ({"chat_template_kwargs": {"enable_thinking": [1]}}, "chat_template_kwargs.enable_thinking"),
    ({"chat_template_kwargs": 3}, "chat_template_kwargs"),
    ({"reasoning_effort": "low"}, "reasoning_effort"),
    ({"chat_template": "{{ messages }}"}, "chat_template"),
    ({"documents": [{"text": "x"}]}, "documents"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ({"continue_final_message": True, "messages": ASKED}, "continue_final_message"),
]


@pytest.mark.parametrize(("fields", "param"), WRONG)
async def test_chat_that_is_wrong_is_refused_by_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as raised:
        await chat(QWEN, **fields)
    assert raised.value.param == param


async def test_reasoning_is_split_where_the_template_marks_it() -> None:
    thought = "<think>\nHm.\n</think>\n\nYes."
    assert read(await chat(QWEN), thought) == [ReasoningPiece("Hm."), ContentPiece("Yes.")]
    assert read(await chat(QWEN, include_reasoning=False), thought) == [ContentPiece("Yes.")]
    assert read(await chat(PLAIN), thought) == [ContentPiece(thought)]
    assert read(await chat(QWEN, reasoning_parser="none"), thought) == [ContentPiece(thought)]
    assert read(await chat(PLAIN, reasoning_parser="think"), thought)[0] == ReasoningPiece("Hm.")


async def test_reasoning_that_the_prompt_opens_needs_no_tag() -> None:
    assert read(await chat(DEEPSEEK), "Hm.\n</think>Yes.") == [ReasoningPiece("Hm."), ContentPiece("Yes.")]


async def test_template_variables_reach_the_template() -> None:
    prompt = await chat(QWEN, chat_template_kwargs={"enable_thinking": False})
    assert text_of(prompt).endswith("</think>\n\n")
    assert read(prompt, "<think>") == [ContentPiece("<think>")]
    effort = "{{ reasoning_effort }}"
    assert text_of(await chat(effort, reasoning_effort="low")) == "low"


@pytest.mark.parametrize("special_tokens", [(), ("<think>", "</think>")])
async def test_structure_begins_after_the_reasoning(special_tokens: tuple[str, ...]) -> None:
    prompt = await chat(QWEN, guided_choice=["yes"], special_tokens=special_tokens)
    if special_tokens:
        assert prompt.grammar is not None
        assert "<[250]> thought" in prompt.grammar
        assert "<[251]>" in prompt.grammar
        return
    assert matches(prompt, "yes")
    assert matches(prompt, "<think>\nno, {yes}\n</think>\n\nyes")
    assert not matches(prompt, "<think>\nno\n</think>\n\nno")
    opened = await chat(DEEPSEEK, guided_choice=["yes"])
    assert matches(opened, "no</think>yes")
    assert not matches(opened, "yes")
    closed = await chat(QWEN, guided_choice=["yes"], chat_template_kwargs={"enable_thinking": False})
    assert not matches(closed, "<think></think>yes")
    assert matches(closed, "yes")


async def test_forced_call_comes_after_the_reasoning() -> None:
    prompt = await chat(QWEN, tools=[WEATHER], tool_choice="required")
    answer = "<think>a</think>\n" + CALLS["hermes"] % PARIS
    assert matches(prompt, answer)
    assert read(prompt, answer)[1:] == [ToolCallStart(0, "", "weather"), ToolArguments(0, PARIS)]


async def test_markers_that_are_special_tokens_stay_in_the_text_and_others_are_left_out() -> None:
    special_tokens = ("<|python_tag|>", "<|eom|>")
    prompt = await chat(LLAMA, tools=[WEATHER], special_tokens=special_tokens)
    assert not prompt.sampling(max_model_len=1000).skip_special_tokens
    assert read(prompt, f"Hi<|eom|><|python_tag|>{CALLS['llama3'] % PARIS}<|eom|>") == [
        ContentPiece("Hi"),
        ToolCallStart(0, "", "weather"),
        ToolArguments(0, PARIS),
    ]
    shown = await chat(LLAMA, tools=[WEATHER], special_tokens=special_tokens, skip_special_tokens=False)
    assert read(shown, "Hi<|eom|>") == [ContentPiece("Hi<|eom|>")]
    without = await chat(LLAMA, special_tokens=special_tokens)
    assert without.sampling(max_model_len=1000).skip_special_tokens


async def test_last_message_is_continued_where_it_ends() -> None:
    messages = [USER, {"role": "assistant", "content": "Once "}]
    text = text_of(await chat(QWEN, messages=messages, continue_final_message=True))
    assert text.endswith("<|im_start|>assistant\nOnce ")
    thinking = [USER, {"role": "assistant", "content": "<think>Hm"}]
    prompt = await chat(QWEN, messages=thinking, continue_final_message=True)
    assert read(prompt, ".</think>Yes.") == [ReasoningPiece("."), ContentPiece("Yes.")]
    with pytest.raises(InvalidField, match="leaves out the last message"):
        await chat("{{ messages[0].role }}", messages=messages, continue_final_message=True)


async def test_prompt_without_generation_prompt_ends_with_the_last_message() -> None:
    assert text_of(await chat(QWEN, add_generation_prompt=False)).endswith("Hi<|im_end|>\n")


async def test_model_without_chat_template_refuses_chats() -> None:
    with pytest.raises(UnsupportedField, match="no chat template"):
        await chat(None, tools=[WEATHER])
