"""Calls as DeepSeek writes them, between special tokens.

V3 has `function`, a separator, the name and the arguments as a block of code; V3.1 the name, the separator and the
arguments. Both are read; which one is forced depends on the model.
"""

import re
from collections.abc import Mapping, Sequence, Set
from enum import Enum
from typing import assert_never

from pdserve.gateway.chat_parser import ChatParser, ChatPiece, ToolArguments, ToolCallStart
from pdserve.gateway.formats.json_call import ObjectSpan
from pdserve.gateway.formats.markers import TrimmedContent, split_at_marker
from pdserve.gateway.formats.tool_format import NewCallId, lark_calls, lark_marker, lark_text, random_call_id


def _marker(name: str) -> str:
    bar = "\uff5c"
    return f"<{bar}{name}{bar}>"


CALLS_BEGIN = _marker("tool▁calls▁begin")
CALLS_END = _marker("tool▁calls▁end")
CALL_BEGIN = _marker("tool▁call▁begin")
CALL_END = _marker("tool▁call▁end")
SEPARATOR = _marker("tool▁sep")
FENCE_OPEN = "\n```json\n"
FENCE_CLOSE = "\n```"

MAX_HEAD_CHARS = 1024
"""From the beginning of a call to its arguments; longer is no call, so that little text is held back."""

_HEAD = re.compile(
    rf"\s*(?:function{SEPARATOR}\s*(?P<fenced>[\w.-]+)\s*```(?:json)?|(?P<plain>[\w.-]+)\s*{SEPARATOR})\s*(?={{)"
)
_FENCE = re.compile(r"\s*(?:`{1,3}\s*)?")


class DeepSeekFormat:
    markers = (CALLS_BEGIN, CALLS_END, CALL_BEGIN, CALL_END, SEPARATOR)

    def __init__(self, *, is_fenced: bool) -> None:
        """`is_fenced`: as V3 and R1 write calls, not V3.1."""
        self._is_fenced = is_fenced
        self.name = "deepseek_v3" if is_fenced else "deepseek_v31"

    def parser(self, names: Set[str], new_call_id: NewCallId = random_call_id) -> ChatParser:
        return DeepSeekParser(names, new_call_id)

    def forced(self, names: Sequence[str], special_tokens: Mapping[str, int], *, max_calls: int) -> str:
        begin, separator, end = (lark_marker(marker, special_tokens) for marker in (CALL_BEGIN, SEPARATOR, CALL_END))
        if self._is_fenced:
            heads = [f'"function" {separator} {lark_text(name + FENCE_OPEN)}' for name in names]
            end = f"{lark_text(FENCE_CLOSE)} {end}"
        else:
            heads = [f"{lark_text(name)} {separator}" for name in names]
        calls = [f"{begin} {head} @arguments_{index} {end}" for index, head in enumerate(heads)]
        between = '"\\n"' if self._is_fenced else ""
        first, last = (lark_marker(marker, special_tokens) for marker in (CALLS_BEGIN, CALLS_END))
        return f"start: {first} calls {last}\n" + lark_calls(calls, separator=between, max_calls=max_calls)


class _Place(Enum):
    CONTENT = "content"
    HEAD = "head"
    ARGUMENTS = "arguments"
    FENCE = "fence"
    """After the arguments."""


class DeepSeekParser:
    def __init__(self, names: Set[str], new_call_id: NewCallId) -> None:
        self._names = names
        self._new_call_id = new_call_id
        self._content = TrimmedContent()
        self._held = ""
        self._place = _Place.CONTENT
        self._span = ObjectSpan()
        self._num_calls = 0

    def feed(self, text: str) -> list[ChatPiece]:
        self._held += text
        pieces: list[ChatPiece] = []
        while self._advance(pieces):
            pass
        return pieces

    def finish(self) -> list[ChatPiece]:
        pieces: list[ChatPiece] = []
        match self._place:
            case _Place.CONTENT:
                pieces += self._content.add(self._held)
            case _Place.HEAD:
                pieces += self._content.add(CALL_BEGIN + self._held)
            case _Place.ARGUMENTS | _Place.FENCE:
                pass
            case _:
                assert_never(self._place)
        return pieces + self._content.finish()

    def _advance(self, pieces: list[ChatPiece]) -> bool:
        """False when it needs more text; so do the others."""
        match self._place:
            case _Place.CONTENT:
                return self._read_content(pieces)
            case _Place.HEAD:
                return self._read_head(pieces)
            case _Place.ARGUMENTS:
                return self._read_arguments(pieces)
            case _Place.FENCE:
                return self._read_fence()
            case _:
                assert_never(self._place)

    def _read_content(self, pieces: list[ChatPiece]) -> bool:
        before, marker, self._held = split_at_marker(self._held, (CALLS_BEGIN, CALLS_END, CALL_BEGIN, CALL_END))
        pieces += self._content.add(before)
        if marker == CALL_BEGIN:
            self._place = _Place.HEAD
        return marker is not None

    def _read_head(self, pieces: list[ChatPiece]) -> bool:
        head = _HEAD.match(self._held[:MAX_HEAD_CHARS])
        name = (head["fenced"] or head["plain"]) if head else None
        if head is None and len(self._held) < MAX_HEAD_CHARS and CALL_END not in self._held:
            return False
        if head is None or name is None or name not in self._names:
            pieces += self._content.add(CALL_BEGIN)
            self._place = _Place.CONTENT
            return True
        self._content.call_begins()
        pieces.append(ToolCallStart(self._num_calls, self._new_call_id(), name))
        self._held = self._held[head.end() :]
        self._span = ObjectSpan()
        self._place = _Place.ARGUMENTS
        return True

    def _read_fence(self) -> bool:
        fence = _FENCE.match(self._held)
        num_dropped = fence.end() if fence else 0
        if num_dropped == len(self._held):
            return False
        self._held = self._held[num_dropped:]
        self._place = _Place.CONTENT
        return True

    def _read_arguments(self, pieces: list[ChatPiece]) -> bool:
        end = self._span.end(self._held)
        taken = self._held if end is None else self._held[:end]
        self._held = self._held[len(taken) :]
        if taken:
            pieces.append(ToolArguments(self._num_calls, taken))
        if end is not None:
            self._num_calls += 1
            self._place = _Place.FENCE
        return end is not None
