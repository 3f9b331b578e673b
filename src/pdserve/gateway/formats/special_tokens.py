"""Special tokens in an answer whose text has them because its format needs some."""

from collections.abc import Set

from pdserve.gateway.chat_parser import ChatParser, ChatPiece
from pdserve.gateway.formats.markers import split_at_marker


class WithoutSpecialTokens:
    """Passes text on to another parser, without these tokens."""

    def __init__(self, parser: ChatParser, hidden: Set[str]) -> None:
        self._parser = parser
        self._hidden = tuple(
            token
            for token in sorted(hidden)
            if token and not any(token != other and token.startswith(other) for other in hidden if other)
        )
        """Without those that begin with another one."""
        self._held = ""

    def feed(self, text: str) -> list[ChatPiece]:
        self._held += text
        pieces: list[ChatPiece] = []
        marker: str | None = ""
        while marker is not None:
            before, marker, self._held = split_at_marker(self._held, self._hidden)
            pieces += self._parser.feed(before) if before else []
        return pieces

    def finish(self) -> list[ChatPiece]:
        return [*(self._parser.feed(self._held) if self._held else []), *self._parser.finish()]
