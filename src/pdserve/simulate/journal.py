"""What happened, in order: kept cheaply, written out only when a rule was broken."""

from collections import deque
from dataclasses import dataclass

from pdserve.units import NS_PER_MS
from pdserve.wire.peer import Message

MAX_ENTRIES = 20_000
MAX_LINE_LENGTH = 300


@dataclass(frozen=True, slots=True)
class Entry:
    at_ns: int
    who: str
    what: str
    message: Message | None
    is_fault: bool

    def line(self) -> str:
        text = f"{self.at_ns / NS_PER_MS:12.3f} ms  {self.who}: {self.what} {self.message or ''}".rstrip()
        return text if len(text) <= MAX_LINE_LENGTH else f"{text[:MAX_LINE_LENGTH]}..."


class Journal:
    def __init__(self) -> None:
        self.now_ns = 0
        self._entries: deque[Entry] = deque(maxlen=MAX_ENTRIES)

    def note(self, who: str, what: str, message: Message | None = None, *, is_fault: bool = False) -> None:
        self._entries.append(Entry(self.now_ns, who, what, message, is_fault))

    def lines(self, *, about: tuple[str, ...], max_lines: int) -> list[str]:
        """The last lines that name one of `about` (all, when it is empty), and every fault between them."""
        lines: list[str] = []
        for entry in reversed(self._entries):
            whole = f"{entry.what} {entry.message or ''}"
            if entry.is_fault or not about or any(name in whole for name in about):
                lines.append(entry.line())
            if len(lines) == max_lines:
                break
        return lines[::-1]
