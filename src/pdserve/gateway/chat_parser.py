"""What the text of an answer says to a chat client: content, reasoning, calls of tools. The port of the formats."""

from collections.abc import Callable
from typing import Protocol

import msgspec


class ContentPiece(msgspec.Struct, frozen=True):
    text: str


class ReasoningPiece(msgspec.Struct, frozen=True):
    text: str


class ToolCallStart(msgspec.Struct, frozen=True):
    index: int
    """Of the call within the answer, from 0 on."""
    call_id: str
    name: str


class ToolArguments(msgspec.Struct, frozen=True):
    """More of the arguments of a call that has started."""

    index: int
    text: str


ChatPiece = ContentPiece | ReasoningPiece | ToolCallStart | ToolArguments


class ChatParser(Protocol):
    """Lifetime: one attempt of one choice of an answer; a retried answer gets a new one.

    Ensures: the pieces do not depend on how the text is cut, but for where pieces of one kind are; none is empty.
    """

    def feed(self, text: str) -> list[ChatPiece]:
        """What this text makes certain."""
        ...

    def finish(self) -> list[ChatPiece]:
        """The rest, as content where it only began like something else. Nothing may be fed afterwards."""
        ...


MakeChatParser = Callable[[], ChatParser]


class PlainParser:
    """All text is content."""

    def feed(self, text: str) -> list[ChatPiece]:
        return [ContentPiece(text)] if text else []

    def finish(self) -> list[ChatPiece]:
        return []
