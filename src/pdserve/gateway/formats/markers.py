"""Markers such as `<tool_call>` in a text that comes in pieces."""

from collections.abc import Sequence
from typing import NamedTuple

from pdserve.gateway.chat_parser import ChatPiece, ContentPiece


class Split(NamedTuple):
    before: str
    marker: str | None
    rest: str
    """What follows the marker; without a marker, the end of the text that may be the beginning of one."""


def split_at_marker(text: str, markers: Sequence[str]) -> Split:
    """Where the first marker is complete.

    Requires: no marker is empty, or the beginning of another one.
    Ensures: the same marker, however the text is cut: one that may still become complete goes before those after it.
    """
    first_letters = {marker[0] for marker in markers}
    for position, letter in enumerate(text):
        if letter not in first_letters:
            continue
        for marker in markers:
            if text.startswith(marker, position):
                return Split(text[:position], marker, text[position + len(marker) :])
        num_left = len(text) - position
        if any(len(marker) > num_left and text.endswith(marker[:num_left]) for marker in markers):
            return Split(text[:position], None, text[position:])
    return Split(text, None, "")


class TrimmedContent:
    """Content beside calls: without the whitespace that only sets them apart."""

    def __init__(self) -> None:
        self._space = ""
        """Held back: what comes next tells whether it is content."""
        self._follows_call = False

    def add(self, text: str) -> list[ChatPiece]:
        text = self._space + text
        if self._follows_call:
            text = text.lstrip()
        kept = text.rstrip()
        self._space = text[len(kept) :]
        if not kept:
            return []
        self._follows_call = False
        return [ContentPiece(kept)]

    def call_begins(self) -> None:
        self._space = ""
        self._follows_call = True

    def finish(self) -> list[ChatPiece]:
        return [ContentPiece(self._space)] if self._space else []
