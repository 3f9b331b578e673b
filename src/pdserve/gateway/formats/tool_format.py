"""The port of the formats in which models write calls of tools."""

import json
import secrets
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Protocol

from pdserve.gateway.chat_parser import ChatParser, ChatPiece, ToolArguments, ToolCallStart

MAX_FORCED_CALLS = 16
"""A small model that must call would go on until the context is full."""

NewCallId = Callable[[], str]


def random_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


class ToolFormat(Protocol):
    @property
    def name(self) -> str:
        """As in `--tool-parser`."""
        ...

    @property
    def markers(self) -> Sequence[str]:
        """Those that may be special tokens of a vocabulary, which an answer's text then has to keep."""
        ...

    def parser(self, names: Set[str], new_call_id: NewCallId = random_call_id) -> ChatParser:
        """Reads calls of these tools; anything else is content."""
        ...

    def forced(self, names: Sequence[str], special_tokens: Mapping[str, int], *, max_calls: int) -> str:
        """A Lark grammar of 1 to `max_calls` calls, and nothing else.

        Arguments of the tool with index i are the grammar `@arguments_i`; `special_tokens` are the vocabulary's.
        """
        ...


def lark_calls(calls: Sequence[str], *, separator: str, max_calls: int) -> str:
    """Rules for `calls`: one of these or several, given how one call of each tool is written."""
    more = f" ({separator} call){{0,{max_calls - 1}}}" if max_calls > 1 else ""
    return f"calls: call{more}\ncall: {' | '.join(calls)}\n"


def lark_text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def lark_marker(marker: str, special_tokens: Mapping[str, int]) -> str:
    """No text matches a special token in llguidance's Lark: it is named by its id."""
    token_id = special_tokens.get(marker)
    return lark_text(marker) if token_id is None else f"<[{token_id}]>"


def lark_json_call(name: str, index: int, *, arguments_key: str) -> str:
    """A call as a JSON object, of the tool with this index."""
    start = f'{{"name": {json.dumps(name)}, {json.dumps(arguments_key)}: '
    return f'{lark_text(start)} @arguments_{index} "}}"'


class FirstCallOnly:
    """For clients that want no parallel calls: those after the first one are dropped."""

    def __init__(self, parser: ChatParser) -> None:
        self._parser = parser

    def feed(self, text: str) -> list[ChatPiece]:
        return [piece for piece in self._parser.feed(text) if _is_wanted(piece)]

    def finish(self) -> list[ChatPiece]:
        return [piece for piece in self._parser.finish() if _is_wanted(piece)]


def _is_wanted(piece: ChatPiece) -> bool:
    return not isinstance(piece, ToolCallStart | ToolArguments) or piece.index == 0
