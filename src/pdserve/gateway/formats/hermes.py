"""Calls as Hermes and Qwen write them: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, anywhere."""

from collections.abc import Mapping, Sequence, Set

from pdserve.gateway.chat_parser import ChatParser, ChatPiece
from pdserve.gateway.formats.json_call import CallState, JsonCall
from pdserve.gateway.formats.markers import TrimmedContent, split_at_marker
from pdserve.gateway.formats.tool_format import NewCallId, lark_calls, lark_json_call, lark_marker, random_call_id

OPEN = "<tool_call>"
CLOSE = "</tool_call>"


class HermesFormat:
    name = "hermes"
    markers = (OPEN, CLOSE)

    def parser(self, names: Set[str], new_call_id: NewCallId = random_call_id) -> ChatParser:
        return HermesParser(names, new_call_id)

    def forced(self, names: Sequence[str], special_tokens: Mapping[str, int], *, max_calls: int) -> str:
        before, after = f'{lark_marker(OPEN, special_tokens)} "\\n"', f'"\\n" {lark_marker(CLOSE, special_tokens)}'
        calls = [
            f"{before} {lark_json_call(name, index, arguments_key='arguments')} {after}"
            for index, name in enumerate(names)
        ]
        return "start: calls\n" + lark_calls(calls, separator='"\\n"', max_calls=max_calls)


class HermesParser:
    def __init__(self, names: Set[str], new_call_id: NewCallId) -> None:
        self._names = names
        self._new_call_id = new_call_id
        self._content = TrimmedContent()
        self._held = ""
        self._call: JsonCall | None = None
        self._num_calls = 0
        self._awaits_close = False

    def feed(self, text: str) -> list[ChatPiece]:
        self._held += text
        pieces: list[ChatPiece] = []
        while self._read_content(pieces) if self._call is None else self._read_call(self._call, pieces):
            pass
        return pieces

    def finish(self) -> list[ChatPiece]:
        pieces: list[ChatPiece] = []
        if self._call is not None and not self._call.has_started:
            pieces += self._content.add(OPEN + self._call.text)
        elif self._call is None and not (self._awaits_close and CLOSE.startswith(self._held)):
            pieces += self._content.add(self._held)
        return pieces + self._content.finish()

    def _read_content(self, pieces: list[ChatPiece]) -> bool:
        """False when it needs more text; so does the other."""
        before, marker, self._held = split_at_marker(self._held, (OPEN, CLOSE) if self._awaits_close else (OPEN,))
        pieces += self._content.add(before)
        if marker is None:
            return False
        self._awaits_close = False
        if marker == OPEN:
            self._call = JsonCall(self._names, index=self._num_calls, call_id=self._new_call_id())
        return True

    def _read_call(self, call: JsonCall, pieces: list[ChatPiece]) -> bool:
        text, self._held = self._held, ""
        read = call.feed(text)
        if read:
            self._content.call_begins()
            pieces += read
        if call.state is CallState.OPEN:
            return False
        self._call = None
        self._held = call.text
        if call.state is CallState.DONE:
            self._num_calls += 1
            self._awaits_close = True
        else:
            pieces += self._content.add(OPEN)
        return True
