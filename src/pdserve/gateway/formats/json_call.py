"""One call of a tool, written as a JSON object: `{"name": ..., "arguments": {...}}`."""

import json
import re
from collections.abc import Set
from enum import Enum
from typing import assert_never

from pdserve.gateway.chat_parser import ChatPiece, ToolArguments, ToolCallStart

MAX_TOKEN_CHARS = 1024
"""Of a name or another token before the arguments; longer is no call, so that little text is held back."""

ARGUMENT_KEYS = frozenset({"arguments", "parameters"})
"""Llama says parameters."""
IGNORED_KEYS = frozenset({"type", "id"})

_TOKEN = re.compile(r'\s*([{}\[\],:]|"(?:[^"\\]|\\.)*"|[^\s"{}\[\],:]+(?=[\s"{}\[\],:]))', re.DOTALL)


class ObjectSpan:
    """Where a JSON object ends, in a text that comes in pieces. What is inside is not checked."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._is_escaped = False

    def end(self, text: str) -> int | None:
        """The index after the object's last character, or None while there is more to come. The text begins where the
        last one ended, first with the opening brace."""
        for index, letter in enumerate(text):
            if self._is_escaped:
                self._is_escaped = False
            elif letter == "\\":
                self._is_escaped = self._in_string
            elif letter == '"':
                self._in_string = not self._in_string
            elif self._in_string:
                continue
            elif letter in "{[":
                self._depth += 1
            elif letter in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return index + 1
        return None


class CallState(Enum):
    OPEN = "open"
    """More text may belong to it."""
    DONE = "done"
    REJECTED = "rejected"
    """It is no call of a tool that was offered, and no piece came of it."""


class _Expected(Enum):
    OBJECT = "object"
    KEY = "key"
    COLON = "colon"
    VALUE = "value"
    END = "end"
    """Of a key with its value."""


class JsonCall:
    """Reads one call: its name as soon as the arguments begin, then their text as it comes.

    `text` is what was not read: while open and before the start, all of it; then what follows the call.
    """

    def __init__(self, names: Set[str], *, index: int, call_id: str) -> None:
        self._names = names
        self._index = index
        self._call_id = call_id
        self.state = CallState.OPEN
        self.has_started = False
        self.text = ""
        self._position = 0
        self._expected = _Expected.OBJECT
        self._key = ""
        self._name: str | None = None
        self._span: ObjectSpan | None = None
        self._arguments: list[str] | None = None
        """Those that came before the name."""

    def feed(self, text: str) -> list[ChatPiece]:
        self.text += text
        pieces: list[ChatPiece] = []
        while self.state is CallState.OPEN:
            is_waiting = self._read_token(pieces) if self._span is None else self._read_arguments(self._span, pieces)
            if is_waiting:
                break
        if self.has_started or self.state is CallState.DONE:
            self.text, self._position = self.text[self._position :], 0
        return pieces

    def _read_arguments(self, span: ObjectSpan, pieces: list[ChatPiece]) -> bool:
        """True when it needs more text; so do the others."""
        text = self.text[self._position :]
        end = span.end(text)
        taken = text if end is None else text[:end]
        self._position += len(taken)
        if self._arguments is not None and taken:
            self._arguments.append(taken)
            if self.has_started:
                pieces.append(ToolArguments(self._index, taken))
        if end is not None:
            self._span = None
            self._expected = _Expected.END
        return end is None

    def _read_token(self, pieces: list[ChatPiece]) -> bool:
        token = _TOKEN.match(self.text, self._position)
        if token is None and len(self.text) - self._position <= MAX_TOKEN_CHARS:
            return True
        if token is None or token.end() - self._position > MAX_TOKEN_CHARS or not self._accept(token[1], pieces):
            self.state = CallState.DONE if self.has_started else CallState.REJECTED
            return True
        if self._span is None:
            self._position = token.end()
        else:
            self._position = token.start(1)
        return False

    def _accept(self, token: str, pieces: list[ChatPiece]) -> bool:
        """False when no call goes on with this token."""
        match self._expected:
            case _Expected.OBJECT:
                self._expected = _Expected.KEY
                return token == "{"
            case _Expected.KEY:
                self._key = _string(token) or ""
                self._expected = _Expected.COLON
                return self._key == "name" or self._key in ARGUMENT_KEYS | IGNORED_KEYS
            case _Expected.COLON:
                self._expected = _Expected.VALUE
                return token == ":"
            case _Expected.VALUE:
                self._expected = _Expected.END
                return self._accept_value(token, pieces)
            case _Expected.END:
                self._expected = _Expected.KEY
                return token == "," or (token == "}" and self._close(pieces))
            case _:
                assert_never(self._expected)

    def _accept_value(self, token: str, pieces: list[ChatPiece]) -> bool:
        if self._key in IGNORED_KEYS:
            return token not in "{}[],:"
        if self._key in ARGUMENT_KEYS:
            if token != "{" or self._arguments is not None:
                return False
            self._span = ObjectSpan()
            self._arguments = []
            if self._name is not None:
                self._start(self._name, pieces)
            return True
        name = _string(token)
        if name is None or name not in self._names or self._name is not None:
            return False
        self._name = name
        if self._arguments is not None:
            self._start(name, pieces)
        return True

    def _start(self, name: str, pieces: list[ChatPiece]) -> None:
        self.has_started = True
        pieces.append(ToolCallStart(self._index, self._call_id, name))
        if self._arguments:
            pieces.append(ToolArguments(self._index, "".join(self._arguments)))

    def _close(self, pieces: list[ChatPiece]) -> bool:
        """The object ends; a tool without parameters may be called without arguments."""
        if self._name is None:
            return False
        if not self.has_started:
            self._arguments = ["{}"]
            self._start(self._name, pieces)
        self.state = CallState.DONE
        return True


def _string(token: str) -> str | None:
    try:
        value: object = json.loads(token, strict=False)
    except ValueError:
        return None
    return value if isinstance(value, str) else None
