"""What the parsers read from answers as models write them, whole and in any pieces."""

from collections.abc import Callable, Sequence
from itertools import count

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pdserve.gateway.chat_parser import (
    ChatParser,
    ChatPiece,
    ContentPiece,
    PlainParser,
    ReasoningPiece,
    ToolArguments,
    ToolCallStart,
)
from pdserve.gateway.formats import deepseek
from pdserve.gateway.formats.deepseek import DeepSeekFormat
from pdserve.gateway.formats.hermes import HermesFormat
from pdserve.gateway.formats.llama3 import Llama3Format
from pdserve.gateway.formats.reasoning import ReasoningParser, ReasoningStart, reasoning_start, reasoning_start_within
from pdserve.gateway.formats.special_tokens import WithoutSpecialTokens
from pdserve.gateway.formats.tool_format import FirstCallOnly, ToolFormat

NAMES = frozenset({"weather", "now"})
HERMES = HermesFormat()
LLAMA3 = Llama3Format()
V3 = DeepSeekFormat(is_fenced=True)
V31 = DeepSeekFormat(is_fenced=False)

WEATHER = '{"city": "Paris {}\\"", "days": [1, {"a": "}"}]}'

SAID = tuple[str, str]
"""What a parser read: "content", "reasoning" or a tool's name, and the text."""


def parser_of(tool_format: ToolFormat) -> ChatParser:
    numbers = count()
    return tool_format.parser(NAMES, lambda: f"call_{next(numbers)}")


def read(parser: ChatParser, pieces: Sequence[str]) -> list[ChatPiece]:
    return [piece for text in pieces for piece in parser.feed(text)] + parser.finish()


def said(pieces: Sequence[ChatPiece]) -> list[SAID]:
    """Joined: neighbours of one kind are one; calls with their arguments in the order of their starts."""
    joined: list[SAID] = []
    calls: dict[int, int] = {}
    for piece in pieces:
        match piece:
            case ToolCallStart(index=index, name=name):
                assert index == len(calls)
                calls[index] = len(joined)
                joined.append((name, ""))
            case ToolArguments(index=index, text=text):
                assert text
                name, before = joined[calls[index]]
                joined[calls[index]] = (name, before + text)
            case ContentPiece(text=text) | ReasoningPiece(text=text):
                assert text
                kind = "content" if isinstance(piece, ContentPiece) else "reasoning"
                if joined and joined[-1][0] == kind:
                    joined[-1] = (kind, joined[-1][1] + text)
                else:
                    joined.append((kind, text))
    return joined


def block(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def fenced(name: str, arguments: str) -> str:
    return f"{deepseek.CALL_BEGIN}function{deepseek.SEPARATOR}{name}\n```json\n{arguments}\n```{deepseek.CALL_END}"


def bare(name: str, arguments: str) -> str:
    return f"{deepseek.CALL_BEGIN}{name}{deepseek.SEPARATOR}{arguments}{deepseek.CALL_END}"


def calls(*texts: str, between: str = "") -> str:
    return f"{deepseek.CALLS_BEGIN}{between.join(texts)}{deepseek.CALLS_END}"


CASES: list[tuple[ToolFormat, str, list[SAID]]] = [
    (HERMES, "Hello there.\n", [("content", "Hello there.\n")]),
    (HERMES, " \n", [("content", " \n")]),
    (HERMES, block("weather", WEATHER), [("weather", WEATHER)]),
    (HERMES, "Let me see.\n\n" + block("now", "{}"), [("content", "Let me see."), ("now", "{}")]),
    (HERMES, f"{block('weather', WEATHER)}\n{block('now', '{ }')}\n", [("weather", WEATHER), ("now", "{ }")]),
    (HERMES, f"{block('now', '{}')}\nDone.", [("now", "{}"), ("content", "Done.")]),
    (HERMES, '<tool_call>{"name": "now"}</tool_call>', [("now", "{}")]),
    (HERMES, '<tool_call>{"arguments": {"a": 1}, "name": "now"}</tool_call>', [("now", '{"a": 1}')]),
    (HERMES, '<tool_call>{"type": "function", "name": "now", "parameters": {}, "id": 7 }', [("now", "{}")]),
    # Cut off by max_tokens: what came of the arguments is there.
    (HERMES, '<tool_call>{"name": "now", "arguments": {"a": "b', [("now", '{"a": "b')]),
    (HERMES, '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_c', [("now", "{}")]),
    # A brace too few, and a closing tag inside a string.
    (HERMES, '<tool_call>{"name": "now", "arguments": {}</tool_call>', [("now", "{}")]),
    (HERMES, block("now", '{"a": "</tool_call>"}'), [("now", '{"a": "</tool_call>"}')]),
    # What only looks like a call.
    (HERMES, "a <tool_box> b <tool_", [("content", "a <tool_box> b <tool_")]),
    (HERMES, block("unknown", "{}"), [("content", block("unknown", "{}"))]),
    (
        HERMES,
        '<tool_call>{"name": "now", "arguments": "{}"}',
        [("content", '<tool_call>{"name": "now", "arguments": "{}"}')],
    ),
    (HERMES, '<tool_call>{"name": "no', [("content", '<tool_call>{"name": "no')]),
    (HERMES, "<tool_call> <tool_call>" + block("now", "{}"), [("content", "<tool_call> <tool_call>"), ("now", "{}")]),
    (HERMES, '<tool_call>{"name": "' + "x" * 2000, [("content", '<tool_call>{"name": "' + "x" * 2000)]),
    (
        HERMES,
        '<tool_call>{"name": "n\\ow", "arguments": {}}',
        [("content", '<tool_call>{"name": "n\\ow", "arguments": {}}')],
    ),
    (LLAMA3, "Hello; there.", [("content", "Hello; there.")]),
    (LLAMA3, f'{{"name": "weather", "parameters": {WEATHER}}}', [("weather", WEATHER)]),
    (LLAMA3, f' <|python_tag|>{{"name": "weather", "parameters": {WEATHER}}}', [("weather", WEATHER)]),
    (LLAMA3, 'Yes.<|python_tag|>{"name": "now", "parameters": {}}', [("content", "Yes."), ("now", "{}")]),
    (
        LLAMA3,
        '{"name": "now", "parameters": {"a": 1}}; {"type": "function", "name": "now", "parameters": {"a": 2}}',
        [("now", '{"a": 1}'), ("now", '{"a": 2}')],
    ),
    (LLAMA3, '{"name": "now", "parameters": {}}\n{"name": "now"}', [("now", "{}"), ("now", "{}")]),
    (LLAMA3, '{"name": "now", "parameters": {}}; so', [("now", "{}"), ("content", "; so")]),
    (LLAMA3, '{"name": "now", "parameters": {}}; {"a": 1}', [("now", "{}"), ("content", '; {"a": 1}')]),
    (LLAMA3, '{"city": "Paris"}', [("content", '{"city": "Paris"}')]),
    (LLAMA3, '{"name": "Ada", "parameters": {}}', [("content", '{"name": "Ada", "parameters": {}}')]),
    (LLAMA3, 'Say {"name": "now", "parameters": {}}', [("content", 'Say {"name": "now", "parameters": {}}')]),
    (LLAMA3, "<|python_tag|>print(1)", [("content", "print(1)")]),
    (LLAMA3, "<|python", [("content", "<|python")]),
    (LLAMA3, "{", [("content", "{")]),
    (V3, "Hello.", [("content", "Hello.")]),
    (V3, calls(fenced("weather", WEATHER)), [("weather", WEATHER)]),
    (V3, "Hm.\n" + calls(fenced("now", "{}")), [("content", "Hm."), ("now", "{}")]),
    (
        V3,
        calls(fenced("weather", WEATHER), fenced("now", "{}"), between="\n"),
        [("weather", WEATHER), ("now", "{}")],
    ),
    (V3, calls(fenced("now", '{"a": "```"}')), [("now", '{"a": "```"}')]),
    (V3, calls(fenced("now", "{}"))[: -len(deepseek.CALLS_END + deepseek.CALL_END) - 2], [("now", "{}")]),
    (V31, calls(bare("weather", WEATHER), bare("now", "{}")), [("weather", WEATHER), ("now", "{}")]),
    (V31, deepseek.CALL_BEGIN + "sing!", [("content", deepseek.CALL_BEGIN + "sing!")]),
    (V31, deepseek.CALL_BEGIN + "x" * 2000, [("content", deepseek.CALL_BEGIN + "x" * 2000)]),
    (V3, "<\uff5ctool", [("content", "<\uff5ctool")]),
]


@pytest.mark.parametrize(("tool_format", "text", "expected"), CASES)
def test_parser_of_a_whole_answer_reads_content_and_calls(
    tool_format: ToolFormat, text: str, expected: list[SAID]
) -> None:
    assert said(read(parser_of(tool_format), [text])) == expected


@pytest.mark.parametrize(("tool_format", "text", "expected"), CASES)
def test_parser_fed_letter_by_letter_reads_the_same(tool_format: ToolFormat, text: str, expected: list[SAID]) -> None:
    assert said(read(parser_of(tool_format), list(text))) == expected


MORSELS = [
    "<tool_call>", "</tool_call>", '{"name": "now", "arguments": {', '"a": "b"', "}}", '{"name": "', "now", '"', ",",
    ":", "{", "}", "[", "]", " ", "\n", "x", "\\", ";", "<", "<|python_tag|>", '{"name": "now", "parameters": {}}', "1",
    deepseek.CALLS_BEGIN, deepseek.CALL_BEGIN, deepseek.CALL_END, deepseek.CALLS_END, deepseek.SEPARATOR, "function",
    "```", "json", "<think>", "</think>", "\uff5c", "tool", "null",
]  # fmt: skip

PARSERS: list[Callable[[], ChatParser]] = [
    lambda: parser_of(HERMES),
    lambda: parser_of(LLAMA3),
    lambda: parser_of(V3),
    lambda: FirstCallOnly(parser_of(HERMES)),
    lambda: ReasoningParser(parser_of(HERMES), ReasoningStart.CHOSEN, is_shown=True),
    lambda: ReasoningParser(parser_of(V3), ReasoningStart.OPEN, is_shown=True),
    lambda: ReasoningParser(PlainParser(), ReasoningStart.OPEN, is_shown=False),
    lambda: WithoutSpecialTokens(parser_of(LLAMA3), {"<|eom|>", "</think>", "<think>", "{", ""}),
]


def cut(text: str, places: Sequence[int]) -> list[str]:
    ends = sorted({place % (len(text) + 1) for place in places} | {len(text)})
    return [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]


@given(
    st.sampled_from(PARSERS),
    st.lists(st.sampled_from(MORSELS), max_size=16).map("".join),
    st.lists(st.integers(0, 400), max_size=8),
)
@example(PARSERS[0], block("now", "{}") + "\n" + block("now", '{"a": 1}'), [3, 14, 50])
def test_parser_fed_in_any_pieces_reads_the_same(
    make: Callable[[], ChatParser], text: str, places: Sequence[int]
) -> None:
    whole = said(read(make(), [text]))
    assert said(read(make(), cut(text, places))) == whole
    assert said(read(make(), list(text))) == whole


@given(st.lists(st.sampled_from(MORSELS), max_size=16).map("".join))
def test_parser_of_text_without_calls_loses_nothing(text: str) -> None:
    """Hermes drops nothing but the tags of calls and the whitespace beside them."""
    pieces = read(parser_of(HERMES), [text])
    if not any(isinstance(piece, ToolCallStart) for piece in pieces):
        assert "".join(piece.text for piece in pieces if isinstance(piece, ContentPiece)) == text


def test_call_gives_its_name_before_its_arguments_are_complete() -> None:
    parser = parser_of(HERMES)
    assert parser.feed('<tool_call>\n{"name": "now", "arguments": ') == []
    assert parser.feed('{"a": ') == [ToolCallStart(0, "call_0", "now"), ToolArguments(0, '{"a": ')]
    assert parser.feed("1") == [ToolArguments(0, "1")]


def test_content_that_is_json_is_not_held_back_by_llama3() -> None:
    assert parser_of(LLAMA3).feed('{"city"') == [ContentPiece('{"city"')]


def test_first_call_only_drops_the_others() -> None:
    parser = FirstCallOnly(parser_of(HERMES))
    assert said(read(parser, [block("now", "{}") + block("weather", "{}") + "end"])) == [
        ("now", "{}"),
        ("content", "end"),
    ]


REASONING_CASES: list[tuple[ReasoningStart, str, list[SAID]]] = [
    (ReasoningStart.CHOSEN, "<think>\nHm. \n</think>\n\nYes.", [("reasoning", "Hm."), ("content", "Yes.")]),
    (ReasoningStart.CHOSEN, "\n<think>a b", [("reasoning", "a b")]),
    (ReasoningStart.CHOSEN, "<think>\n\n</think>\n\nYes.", [("content", "Yes.")]),
    (ReasoningStart.CHOSEN, " <thin", [("content", " <thin")]),
    (ReasoningStart.CHOSEN, "Yes <think>", [("content", "Yes <think>")]),
    (ReasoningStart.OPEN, "\nHm.</think>Yes.\n", [("reasoning", "Hm."), ("content", "Yes.\n")]),
    (ReasoningStart.OPEN, "<think>Hm.</think>Yes.", [("reasoning", "Hm."), ("content", "Yes.")]),
    (ReasoningStart.OPEN, "Hm </thin", [("reasoning", "Hm </thin")]),
    (ReasoningStart.OPEN, "<th", [("reasoning", "<th")]),
    (ReasoningStart.CLOSED, "<think>", [("content", "<think>")]),
]


@pytest.mark.parametrize(("start", "text", "expected"), REASONING_CASES)
def test_reasoning_is_split_from_the_answer(start: ReasoningStart, text: str, expected: list[SAID]) -> None:
    for pieces in ([text], list(text)):
        assert said(read(ReasoningParser(PlainParser(), start, is_shown=True), pieces)) == expected
        hidden = said(read(ReasoningParser(PlainParser(), start, is_shown=False), pieces))
        assert hidden == [entry for entry in expected if entry[0] != "reasoning"]


def test_reasoning_goes_before_calls() -> None:
    parser = ReasoningParser(parser_of(HERMES), ReasoningStart.CHOSEN, is_shown=True)
    text = "<think>I call <tool_call>.</think>\n\n" + block("now", "{}")
    assert said(read(parser, [text])) == [("reasoning", "I call <tool_call>."), ("now", "{}")]


@pytest.mark.parametrize(
    ("prompt", "start"),
    [
        ("<|assistant|><think>\n", ReasoningStart.OPEN),
        ("<|assistant|><think>\n\n</think>\n\n", ReasoningStart.CLOSED),
        ("<think>a</think>b<|assistant|>", ReasoningStart.CHOSEN),
    ],
)
def test_prompt_tells_where_the_answer_begins(prompt: str, start: ReasoningStart) -> None:
    assert reasoning_start(prompt) is start


@pytest.mark.parametrize(
    ("message", "start"),
    [
        ("<think>a", ReasoningStart.OPEN),
        ("<think>a</think>b", ReasoningStart.CLOSED),
        ("b", ReasoningStart.CLOSED),
        ("", ReasoningStart.CHOSEN),
    ],
)
def test_unfinished_message_tells_where_it_goes_on(message: str, start: ReasoningStart) -> None:
    assert reasoning_start_within(message) is start


def test_special_tokens_are_left_out_of_text() -> None:
    parser = WithoutSpecialTokens(PlainParser(), {"<|im_start|>", "<|im_start|>x"})
    assert said(read(parser, list("a<|im_start|>xb<|im_"))) == [("content", "axb<|im_")]
