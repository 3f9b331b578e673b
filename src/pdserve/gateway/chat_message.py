"""An assistant's message out of the pieces that a parser finds in an answer, whole and as the deltas of a stream."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import assert_never

from pdserve.gateway.chat_parser import ChatPiece, ContentPiece, ReasoningPiece, ToolArguments, ToolCallStart
from pdserve.gateway.logprobs import JsonObject


@dataclass(slots=True)
class _Call:
    start: ToolCallStart | None = None
    """None: it started in an earlier delta."""
    arguments: list[str] = field(default_factory=list[str])

    @property
    def body(self) -> JsonObject:
        arguments = "".join(self.arguments)
        if self.start is None:
            return {"function": {"arguments": arguments}}
        function = {"name": self.start.name, "arguments": arguments}
        return {"id": self.start.call_id, "type": "function", "function": function}


@dataclass(slots=True)
class _Sorted:
    """Pieces by kind, in their order."""

    content: list[str] = field(default_factory=list[str])
    reasoning: list[str] = field(default_factory=list[str])
    calls: dict[int, _Call] = field(default_factory=dict[int, _Call])


def message(pieces: Iterable[ChatPiece]) -> JsonObject:
    """A whole answer. Its content is null where it is nothing but calls of tools."""
    by_kind = _sorted(pieces)
    content = "".join(by_kind.content)
    body: JsonObject = {
        "role": "assistant",
        "content": None if by_kind.calls and not content else content,
        "refusal": None,
    }
    if by_kind.reasoning:
        body["reasoning_content"] = "".join(by_kind.reasoning)
    if by_kind.calls:
        body["tool_calls"] = [call.body for call in by_kind.calls.values()]
    return body


def message_delta(pieces: Iterable[ChatPiece]) -> JsonObject:
    """What these pieces add to a message; empty when there are none."""
    by_kind = _sorted(pieces)
    body: JsonObject = {}
    if by_kind.content:
        body["content"] = "".join(by_kind.content)
    if by_kind.reasoning:
        body["reasoning_content"] = "".join(by_kind.reasoning)
    if by_kind.calls:
        body["tool_calls"] = [{"index": index, **call.body} for index, call in by_kind.calls.items()]
    return body


class ReasoningTokens:
    """How many tokens of an answer are reasoning.

    Pieces don't say which tokens they are of, so tokens count with the next piece that comes at or after them, and
    those of a delta in which reasoning ends count as what follows it.
    """

    def __init__(self) -> None:
        self.num_tokens = 0
        self._num_unread = 0

    def add(self, num_tokens: int, pieces: Sequence[ChatPiece]) -> None:
        """A delta of so many tokens made these pieces certain."""
        self._num_unread += num_tokens
        if not pieces:
            return
        if all(isinstance(piece, ReasoningPiece) for piece in pieces):
            self.num_tokens += self._num_unread
        self._num_unread = 0


def has_call(pieces: Iterable[ChatPiece]) -> bool:
    return any(isinstance(piece, ToolCallStart) for piece in pieces)


def _sorted(pieces: Iterable[ChatPiece]) -> _Sorted:
    by_kind = _Sorted()
    for piece in pieces:
        match piece:
            case ContentPiece(text):
                by_kind.content.append(text)
            case ReasoningPiece(text):
                by_kind.reasoning.append(text)
            case ToolCallStart():
                by_kind.calls.setdefault(piece.index, _Call()).start = piece
            case ToolArguments():
                by_kind.calls.setdefault(piece.index, _Call()).arguments.append(piece.text)
            case _:
                assert_never(piece)
    return by_kind
