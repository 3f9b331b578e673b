"""Calls as Hermes and Qwen write them: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, anywhere."""

from collections.abc import Mapping, Sequence, Set

from pdserve.gateway.chat_parser import ChatParser, ChatPiece
from pdserve.gateway.formats.json_call_parser import JsonCallParser
from pdserve.gateway.formats.markers import split_at_marker
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


class HermesParser(JsonCallParser):
    def __init__(self, names: Set[str], new_call_id: NewCallId) -> None:
        super().__init__(names, new_call_id)
        self._awaits_close = False

    def finish(self) -> list[ChatPiece]:
        pieces: list[ChatPiece] = []
        if self._call is not None and not self._call.has_started:
            pieces += self._content.add(OPEN + self._call.text)
        elif self._call is None and not (self._awaits_close and CLOSE.startswith(self._held)):
            pieces += self._content.add(self._held)
        return pieces + self._content.finish()

    def _read_between(self, pieces: list[ChatPiece]) -> bool:
        before, marker, self._held = split_at_marker(self._held, (OPEN, CLOSE) if self._awaits_close else (OPEN,))
        pieces += self._content.add(before)
        if marker is None:
            return False
        self._awaits_close = False
        if marker == OPEN:
            self._begin_call()
        return True

    def _on_call(self) -> None:
        self._awaits_close = True

    def _on_no_call(self, pieces: list[ChatPiece]) -> None:
        pieces += self._content.add(OPEN)
