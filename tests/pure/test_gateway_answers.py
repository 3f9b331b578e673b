"""Answer bodies: chat choices through a parser, echoed prompts, and the reader that merges streams."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.gateway.answer_reader import AnswerReader
from pdserve.gateway.answers import AnswerWriter
from pdserve.gateway.chat_answers import ChatShape
from pdserve.gateway.chat_parser import (
    ChatParser,
    ChatPiece,
    ContentPiece,
    PlainParser,
    ReasoningPiece,
    ToolArguments,
    ToolCallStart,
)
from pdserve.gateway.echo import Echo
from pdserve.gateway.failures import TIMED_OUT, RequestFailed
from pdserve.gateway.logprobs import TokenDetails
from pdserve.gateway.token_stream import TokenStream
from pdserve.gateway.whole_answers import ChoiceAnswer, PromptAnswer
from pdserve.ids import RequestId
from pdserve.sampling import TokenLogprobs
from pdserve.wire.cluster import Delta, FinishReason, TokenEntry


class LetterParser:
    """A toy format: r is reasoning, c starts a call, a digit is an argument of it; all else is content, but for h,
    which is held back until the end."""

    def __init__(self) -> None:
        self._num_calls = 0
        self._held = ""

    def feed(self, text: str) -> list[ChatPiece]:
        return [piece for letter in text for piece in self._read(letter)]

    def finish(self) -> list[ChatPiece]:
        return [ContentPiece(self._held)] if self._held else []

    def _read(self, letter: str) -> list[ChatPiece]:
        if letter == "h":
            self._held += letter
            return []
        if letter == "r":
            return [ReasoningPiece(letter)]
        if letter == "c":
            self._num_calls += 1
            index = self._num_calls - 1
            return [ToolCallStart(index, f"call_{index}", f"f{index}")]
        if letter.isdigit():
            return [ToolArguments(self._num_calls - 1, letter)]
        return [ContentPiece(letter)]


def token_bytes(token_id: int) -> bytes:
    return bytes([token_id])


def chat_writer(
    make_parser: Callable[[], ChatParser] = LetterParser, *, num_logprobs: int | None = None, num_choices: int = 1
) -> AnswerWriter:
    details = TokenDetails(token_bytes=token_bytes, num_logprobs=num_logprobs)
    return AnswerWriter(
        ChatShape(details, make_parser),
        answer_id="a",
        created_s=1,
        model_name="m",
        system_fingerprint="f",
        num_prompts=1,
        num_choices=num_choices,
        includes_usage=False,
    )


def delta(text: str, finish_reason: FinishReason | None = None, **fields: Any) -> Delta:
    request_id = RequestId("r")
    return Delta(request_id=request_id, token_ids=(1,), text=text, finish_reason=finish_reason, **fields)


def whole_choice(text: str, finish_reason: FinishReason = FinishReason.STOP) -> Any:
    return whole_body([delta(text, finish_reason)], finish_reason)["choices"][0]


def whole_body(deltas: list[Delta], finish_reason: FinishReason) -> Any:
    answer = ChoiceAnswer(deltas=deltas, finish_reason=finish_reason)
    return chat_writer().whole(
        [PromptAnswer(prompt_logprobs=(), choices=(answer,))], num_prompt_tokens=1, num_tokens=len(answer.token_ids)
    )


def streamed_choices(*texts: str, finish_reason: FinishReason = FinishReason.STOP) -> list[Any]:
    writer = chat_writer()
    deltas = [*(delta(text) for text in texts), delta("", finish_reason)]
    bodies: list[Any] = [chunk for piece in deltas for chunk in writer.chunks(0, piece)]
    return [body["choices"][0] for body in bodies]


def assembled(choices: list[Any]) -> dict[str, Any]:
    """The message that a client puts together."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": {}}
    for choice in choices:
        piece = choice["delta"]
        for name in ("content", "reasoning_content"):
            message[name] += piece.get(name, "")
        for call in piece.get("tool_calls", []):
            if "id" in call:
                assert call["index"] not in message["tool_calls"]
                message["tool_calls"][call["index"]] = {**call, "function": dict(call["function"])}
            else:
                message["tool_calls"][call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    return message


def test_chat_answer_with_calls_alone_has_no_content_and_ends_by_them() -> None:
    choice = whole_choice("c12c")
    assert choice["message"] == {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "tool_calls": [
            {"id": "call_0", "type": "function", "function": {"name": "f0", "arguments": "12"}},
            {"id": "call_1", "type": "function", "function": {"name": "f1", "arguments": ""}},
        ],
    }
    assert choice["finish_reason"] == "tool_calls"


@pytest.mark.parametrize(
    ("text", "finish_reason", "said"),
    [
        ("ab", FinishReason.STOP, "stop"),
        ("rab", FinishReason.LENGTH, "length"),
        ("ac1", FinishReason.STOP, "tool_calls"),
        ("ac1", FinishReason.LENGTH, "length"),
    ],
)
def test_chat_answer_says_why_it_ended(text: str, finish_reason: FinishReason, said: str) -> None:
    assert whole_choice(text, finish_reason)["finish_reason"] == said
    assert streamed_choices(*text, finish_reason=finish_reason)[-1]["finish_reason"] == said


@given(texts=st.lists(st.text("abrc12h", max_size=4), max_size=6), finish_reason=st.sampled_from(FinishReason))
def test_chat_stream_adds_up_to_the_whole_message(texts: list[str], finish_reason: FinishReason) -> None:
    text = "c" + "".join(texts)
    whole = whole_choice(text, finish_reason)
    choices = streamed_choices("c", *texts, finish_reason=finish_reason)
    message = assembled(choices)
    calls = [{name: call[name] for name in ("id", "type", "function")} for call in message["tool_calls"].values()]
    assert calls == whole["message"]["tool_calls"]
    assert message["content"] == (whole["message"]["content"] or "")
    assert message["reasoning_content"] == whole["message"].get("reasoning_content", "")
    assert [choice["delta"].get("role") for choice in choices] == ["assistant", *[None] * (len(choices) - 1)]
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == [whole["finish_reason"]]


def test_chat_stream_says_nothing_of_text_that_its_parser_holds_back_until_the_end() -> None:
    choices = streamed_choices("a", "h", "h", "b")
    assert [choice["delta"] for choice in choices] == [
        {"role": "assistant", "content": "a"},
        {"content": "b"},
        {"content": "hh"},
    ]


@pytest.mark.parametrize(
    ("texts", "num_reasoning"),
    [(["a", "b"], 0), (["", "r", "", "r", "", "a"], 4), (["r", "ra", "a"], 1), (["r", "r"], 2)],
)
def test_chat_usage_counts_the_tokens_of_reasoning(texts: list[str], num_reasoning: int) -> None:
    deltas = [*(delta(text) for text in texts[:-1]), delta(texts[-1], FinishReason.LENGTH)]
    writer = chat_writer()
    for piece in deltas:
        list(writer.chunks(0, piece))
    streamed: Any = writer.usage_chunk(num_prompt_tokens=1, num_tokens=len(texts))
    whole = whole_body(deltas, FinishReason.LENGTH)
    assert streamed["usage"] == whole["usage"]
    assert whole["usage"]["completion_tokens_details"] == {"reasoning_tokens": num_reasoning}


def test_chat_logprobs_pass_by_the_parser_unchanged() -> None:
    entry = TokenEntry(text_offset=0, logprobs=TokenLogprobs(token_id=104, logprob=-1.0, top=()))
    writer = chat_writer(num_logprobs=0)
    chunks: list[Any] = list(writer.chunks(0, delta("h", entries=(entry,))))
    assert chunks[0]["choices"][0]["logprobs"]["content"][0]["token"] == "h"
    assert list(writer.chunks(0, delta("h"))) == []


def test_chat_choices_have_a_parser_each() -> None:
    writer = chat_writer(num_choices=2)
    bodies: list[Any] = [
        body
        for choice_index in (0, 1)
        for piece in (delta("c", choice_index=choice_index), delta("", FinishReason.STOP, choice_index=choice_index))
        for body in writer.chunks(0, piece)
    ]
    starts = [body["choices"][0]["delta"]["tool_calls"][0]["index"] for body in bodies[::2]]
    assert starts == [0, 0]


def test_plain_parser_is_the_text() -> None:
    parser = PlainParser()
    assert [*parser.feed("a"), *parser.feed(""), *parser.finish()] == [ContentPiece("a")]


def characters_before_each_byte(text: str) -> list[int]:
    """The obvious way: the character that holds the byte."""
    return [index for index, character in enumerate(text) for _ in character.encode()]


@given(text=st.text(min_size=1))
def test_echo_offsets_of_bytes_are_the_characters_that_hold_them(text: str) -> None:
    echo = Echo(text=text, token_ids=tuple(text.encode()))
    assert echo.text_offsets(token_bytes) == characters_before_each_byte(text)


WORDS = {1: b"<s>", 2: b" Once", 3: b" upon", 4: "\u00e9".encode(), 5: b"</s>"}


@pytest.mark.parametrize(
    ("text", "token_ids", "offsets"),
    [
        ("Once upon\u00e9", (1, 2, 3, 4, 5), [0, 0, 4, 9, 10]),
        (" Once upon", (2, 3), [0, 5]),
        ("<s> Once", (1, 2), [0, 3]),
    ],
)
def test_echo_offsets_count_no_token_that_is_not_in_the_text(
    text: str, token_ids: tuple[int, ...], offsets: list[int]
) -> None:
    assert Echo(text=text, token_ids=token_ids).text_offsets(WORDS.__getitem__) == offsets


def streams(num_streams: int) -> list[TokenStream]:
    return [TokenStream(max_deltas=8) for _ in range(num_streams)]


async def test_reader_takes_turns_among_streams_that_have_something() -> None:
    first, second, third = streams(3)
    for text in "abc":
        first.put(delta(text))
    second.put(delta("x"))
    reader = AnswerReader([first, second, third], num_choices=1)
    arrivals = [await reader.next() for _ in range(2)]
    third.put(delta("y"))
    arrivals += [await reader.next() for _ in range(3)]
    assert [(arrival.prompt_index, arrival.delta.text) for arrival in arrivals] == [
        (0, "a"),
        (1, "x"),
        (2, "y"),
        (0, "b"),
        (0, "c"),
    ]


async def test_reader_that_waits_is_woken_by_any_stream() -> None:
    first, second = streams(2)
    reader = AnswerReader([first, second], num_choices=1)
    for prompt_index, stream in ((1, second), (0, first)):
        waiting = asyncio.create_task(reader.next())
        await asyncio.sleep(0)
        stream.put(delta("x", FinishReason.STOP))
        assert (await asyncio.wait_for(waiting, 5)).prompt_index == prompt_index
    assert reader.is_finished


async def test_reader_is_finished_when_every_choice_is() -> None:
    (stream,) = streams(1)
    reader = AnswerReader([stream], num_choices=2)
    for choice_index in (1, 0):
        assert not reader.is_finished
        stream.put(delta("x", FinishReason.STOP, choice_index=choice_index))
        await reader.next()
    assert reader.is_finished


async def test_reader_fails_with_one_stream_after_what_that_one_still_has() -> None:
    first, second = streams(2)
    second.put(delta("x"))
    second.fail(TIMED_OUT)
    reader = AnswerReader([first, second], num_choices=1)
    assert (await reader.next()).delta.text == "x"
    with pytest.raises(RequestFailed):
        await reader.next()
