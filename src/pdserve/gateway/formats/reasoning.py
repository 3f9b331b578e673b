"""Reasoning between `<think>` and `</think>` before the answer proper, as DeepSeek-R1 and Qwen3 write it."""

from collections.abc import Mapping
from enum import Enum
from typing import assert_never

from pdserve.gateway.chat_parser import ChatParser, ChatPiece, ReasoningPiece
from pdserve.gateway.formats.markers import split_at_marker
from pdserve.gateway.formats.tool_format import lark_marker

OPEN = "<think>"
CLOSE = "</think>"
MARKERS = (OPEN, CLOSE)


class ReasoningStart(Enum):
    """What the prompt says of the answer's beginning."""

    OPEN = "open"
    """The prompt opens the reasoning: the answer begins inside."""
    CHOSEN = "chosen"
    """The model may begin with it."""
    CLOSED = "closed"
    """The prompt has the end of it, as where thinking is switched off."""


def reasoning_start(prompt: str) -> ReasoningStart:
    end = prompt.rstrip()
    if end.endswith(OPEN):
        return ReasoningStart.OPEN
    return ReasoningStart.CLOSED if end.endswith(CLOSE) else ReasoningStart.CHOSEN


def reasoning_start_within(message: str) -> ReasoningStart:
    """For an answer that goes on with an unfinished message."""
    before, opening, after = message.rpartition(OPEN)
    if opening and CLOSE not in after:
        return ReasoningStart.OPEN
    return ReasoningStart.CLOSED if before or after else ReasoningStart.CHOSEN


def reasoning_first(start: ReasoningStart, special_tokens: Mapping[str, int]) -> str:
    """A Lark grammar: `@answer` after the reasoning that comes before it."""
    reasoning = f"{lark_marker(OPEN, special_tokens)} thought"
    match start:
        case ReasoningStart.OPEN:
            rule, reasoning = "start: reasoning space? @answer", "thought"
        case ReasoningStart.CHOSEN:
            rule = "start: (reasoning space?)? @answer"
        case ReasoningStart.CLOSED:
            return "start: @answer"
        case _:
            assert_never(start)
    if CLOSE in special_tokens:
        thought = f"thought: /(.|\\n)*/ {lark_marker(CLOSE, special_tokens)}"
    else:
        thought = "thought[lazy]: /(.|\\n)*<\\/think>/"
    return f"{rule}\nreasoning: {reasoning}\n{thought}\nspace: /\\n{{1,2}}/\n"


class _Place(Enum):
    BEGINNING = "beginning"
    REASONING = "reasoning"
    GAP = "gap"
    """Whitespace after the reasoning."""
    ANSWER = "answer"


class ReasoningParser:
    """Reasoning, then what another parser reads."""

    def __init__(self, answer: ChatParser, start: ReasoningStart, *, is_shown: bool) -> None:
        """`is_shown` is False where the client wants no reasoning: it is left out."""
        self._answer = answer
        self._may_open = start is not ReasoningStart.CLOSED
        self._is_open = start is ReasoningStart.OPEN
        self._is_shown = is_shown
        self._place = _Place.BEGINNING if self._may_open else _Place.ANSWER
        self._held = ""
        self._has_reasoning = False

    def feed(self, text: str) -> list[ChatPiece]:
        self._held += text
        pieces: list[ChatPiece] = []
        while self._advance(pieces):
            pass
        return pieces

    def finish(self) -> list[ChatPiece]:
        pieces: list[ChatPiece] = []
        match self._place:
            case _Place.BEGINNING if not self._is_open:
                pieces += self._answer.feed(self._held)
            case _Place.BEGINNING | _Place.REASONING:
                self._show(self._held.rstrip(), pieces)
            case _Place.GAP | _Place.ANSWER:
                pass
            case _:
                assert_never(self._place)
        return pieces + self._answer.finish()

    def _advance(self, pieces: list[ChatPiece]) -> bool:
        """False when it needs more text; so do the others."""
        match self._place:
            case _Place.BEGINNING:
                return self._read_beginning()
            case _Place.REASONING:
                return self._read_reasoning(pieces)
            case _Place.GAP:
                self._held = self._held.lstrip()
                if self._held:
                    self._place = _Place.ANSWER
                return bool(self._held)
            case _Place.ANSWER:
                text, self._held = self._held, ""
                if text:
                    pieces += self._answer.feed(text)
                return False
            case _:
                assert_never(self._place)

    def _read_beginning(self) -> bool:
        """Where the prompt opens the reasoning, a model may still open it once more."""
        start = self._held.lstrip()
        if len(start) < len(OPEN) and OPEN.startswith(start):
            return False
        if start.startswith(OPEN):
            self._held = start.removeprefix(OPEN)
            self._place = _Place.REASONING
        else:
            self._place = _Place.REASONING if self._is_open else _Place.ANSWER
        return True

    def _read_reasoning(self, pieces: list[ChatPiece]) -> bool:
        if not self._has_reasoning:
            self._held = self._held.lstrip()
        before, marker, rest = split_at_marker(self._held, (CLOSE,))
        shown = before.rstrip()
        self._show(shown, pieces)
        if marker is None:
            self._held = before[len(shown) :] + rest
            return False
        self._held = rest
        self._place = _Place.GAP
        return True

    def _show(self, text: str, pieces: list[ChatPiece]) -> None:
        if text:
            self._has_reasoning = True
            if self._is_shown:
                pieces.append(ReasoningPiece(text))
