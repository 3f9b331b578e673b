"""What parsers of calls that are JSON objects share: they hold text back, and read one call after another."""

from abc import ABC, abstractmethod
from collections.abc import Set

from pdserve.gateway.chat_parser import ChatPiece
from pdserve.gateway.formats.json_call import CallState, JsonCall
from pdserve.gateway.formats.markers import TrimmedContent
from pdserve.gateway.formats.tool_format import NewCallId


class JsonCallParser(ABC):
    def __init__(self, names: Set[str], new_call_id: NewCallId) -> None:
        self._names = names
        self._new_call_id = new_call_id
        self._content = TrimmedContent()
        self._held = ""
        self._call: JsonCall | None = None
        self._num_calls = 0

    def feed(self, text: str) -> list[ChatPiece]:
        self._held += text
        pieces: list[ChatPiece] = []
        while self._read_call(self._call, pieces) if self._call is not None else self._read_between(pieces):
            pass
        return pieces

    @abstractmethod
    def finish(self) -> list[ChatPiece]: ...

    @abstractmethod
    def _read_between(self, pieces: list[ChatPiece]) -> bool:
        """Where no call is read. False when it needs more text."""

    @abstractmethod
    def _on_call(self) -> None:
        """A call has ended."""

    @abstractmethod
    def _on_no_call(self, pieces: list[ChatPiece]) -> None:
        """What began as a call is content; its text is held."""

    def _begin_call(self) -> None:
        self._call = JsonCall(self._names, index=self._num_calls, call_id=self._new_call_id())

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
            self._on_call()
        else:
            self._on_no_call(pieces)
        return True
