"""Calls as Llama 3 writes them: the whole answer is `{"name": ..., "parameters": {...}}`, or several with `;` between.

`<|python_tag|>` may come first, and then begins calls after content too.
"""

import re
from collections.abc import Mapping, Sequence, Set

from pdserve.gateway.chat_parser import ChatParser, ChatPiece
from pdserve.gateway.formats.json_call_parser import JsonCallParser
from pdserve.gateway.formats.markers import split_at_marker
from pdserve.gateway.formats.tool_format import NewCallId, lark_calls, lark_json_call, random_call_id

PYTHON_TAG = "<|python_tag|>"

_SEPARATOR = re.compile(r"\s*;?\s*")


class Llama3Format:
    name = "llama3"
    markers = (PYTHON_TAG,)

    def parser(self, names: Set[str], new_call_id: NewCallId = random_call_id) -> ChatParser:
        return Llama3Parser(names, new_call_id)

    def forced(self, names: Sequence[str], special_tokens: Mapping[str, int], *, max_calls: int) -> str:
        calls = [lark_json_call(name, index, arguments_key="parameters") for index, name in enumerate(names)]
        return "start: calls\n" + lark_calls(calls, separator='"; "', max_calls=max_calls)


class Llama3Parser(JsonCallParser):
    def __init__(self, names: Set[str], new_call_id: NewCallId) -> None:
        super().__init__(names, new_call_id)
        self._may_call = True
        """Where the text is read, a call can begin."""
        self._separator = ""
        """What stands before the call that is read."""

    def finish(self) -> list[ChatPiece]:
        pieces: list[ChatPiece] = []
        if self._call is None:
            pieces += self._content.add(self._held)
        elif not self._call.has_started:
            pieces += self._content.add(self._separator + self._call.text)
        return pieces + self._content.finish()

    def _read_between(self, pieces: list[ChatPiece]) -> bool:
        return self._read_start(pieces) if self._may_call else self._read_content(pieces)

    def _read_start(self, pieces: list[ChatPiece]) -> bool:
        separator = _SEPARATOR.match(self._held) if self._num_calls else None
        self._separator = separator[0] if separator else ""
        start = self._held.removeprefix(self._separator).lstrip()
        if PYTHON_TAG.startswith(start):
            if start == PYTHON_TAG:
                self._held = ""
            return False
        if start.startswith(PYTHON_TAG):
            self._held = start.removeprefix(PYTHON_TAG)
        elif start.startswith("{"):
            self._held = self._held.removeprefix(self._separator)
            self._begin_call()
        else:
            self._may_call = False
        return True

    def _read_content(self, pieces: list[ChatPiece]) -> bool:
        before, marker, self._held = split_at_marker(self._held, (PYTHON_TAG,))
        pieces += self._content.add(before)
        self._may_call = marker is not None
        return self._may_call

    def _on_call(self) -> None:
        """Another one may follow at once."""

    def _on_no_call(self, pieces: list[ChatPiece]) -> None:
        self._may_call = False
        pieces += self._content.add(self._separator)
