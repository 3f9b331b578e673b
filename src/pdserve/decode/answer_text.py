"""The text of one answer as it may go out, and the logprobs of the tokens that it is made of."""

from collections import deque

from pdserve.sampling import TokenLogprobs
from pdserve.text.detokenizer import Detokenizer
from pdserve.text.stops import StopMatcher
from pdserve.text.tokenizer import Tokenizer
from pdserve.wire.cluster import TokenEntry

MAX_HELD_ENTRIES = 2048
"""More than the tokens of the longest stop string, and of a character, can be; only tokens without text come to it."""


class AnswerText:
    """Text is held back while a character or a stop string may be incomplete, and with it the entries of its tokens.

    A stop string cuts the text off; of the entries, those stay whose token has text before the cut. A token without
    text, as special ones are where they are skipped, stays with the character before it. Of more than
    `MAX_HELD_ENTRIES` the oldest go out as if their text did.
    """

    def __init__(self, tokenizer: Tokenizer, *, stop: tuple[str, ...], skip_special_tokens: bool = True) -> None:
        """`skip_special_tokens=False`: special tokens that are added are text like others."""
        self._textless_token_ids = tokenizer.special_token_ids if skip_special_tokens else frozenset[int]()
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
        self._stops = StopMatcher(stop)
        self._num_decoded = 0
        """Characters of all tokens so far, as far as they are complete."""
        self._num_released = 0
        """Leading ones of them that may go out."""
        self._text = ""
        self._held: deque[tuple[int, TokenEntry]] = deque()
        """Each with the character that it goes out with."""
        self._entries: list[TokenEntry] = []

    def add(self, token_id: int, logprobs: TokenLogprobs | None, *, may_stop: bool) -> bool:
        """True when a stop string is complete: the text ends before it, and nothing may be added."""
        if logprobs is None and token_id in self._textless_token_ids:
            return False
        if logprobs is not None:
            entry = TokenEntry(text_offset=self._num_decoded, logprobs=logprobs)
            self._held.append((self._num_decoded - (token_id in self._textless_token_ids), entry))
        return self._release(self._detokenizer.add([token_id]), may_stop=may_stop)

    def finish(self, *, may_stop: bool) -> None:
        """No token comes any more: what was held back goes out, unless a stop string is complete with it."""
        if self._release(self._detokenizer.finish(), may_stop=may_stop):
            return
        self._text += self._stops.finish()
        self._entries += [entry for _, entry in self._held]
        self._held.clear()

    def take(self) -> tuple[str, tuple[TokenEntry, ...]]:
        """What may go out since the last call."""
        text, self._text = self._text, ""
        if not self._entries:
            return text, ()
        entries, self._entries = tuple(self._entries), []
        return text, entries

    def _release(self, piece: str, *, may_stop: bool) -> bool:
        text, found_stop = self._stops.feed(piece, may_stop=may_stop)
        self._num_decoded += len(piece)
        self._num_released += len(text)
        self._text += text
        while self._held and (self._held[0][0] < self._num_released or len(self._held) > MAX_HELD_ENTRIES):
            self._entries.append(self._held.popleft()[1])
        return found_stop
