"""Text from tokens as they come, in pieces that never end inside a character."""

from collections.abc import Sequence

from pdserve.text.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"
"""What bytes that are no UTF-8 decode to; at the end of a text, perhaps the start of a character to come."""
MAX_UNFINISHED = 3
"""Most replacement characters that one unfinished character can show as: it has at most 3 of its 4 bytes."""
MAX_WINDOW_TOKENS = 64
"""Bounds the cost of a model that emits no UTF-8 at all; real characters take at most 4 tokens."""
RESYNC_TOKENS = 16
"""Tokens kept of such a window. Each has a byte or more, and UTF-8 decodes alike again after at most 4 wrong ones."""


class Detokenizer:
    """The text of one output, piece by piece.

        _window = [ context: tokens whose text is out | tokens whose text may be incomplete )

    The context is there because a token's text can depend on the one before it (a leading space). All replacement
    characters at the end are held back: with byte fallback, the first byte of a character makes the complete ones
    before it unreadable until the rest has come.

    Ensures: the pieces together are `tokenizer.decode` of all tokens, or `decode_verbatim` where special tokens are not
    skipped: for byte-level tokenizers always; for those with byte fallback as long as the bytes are UTF-8.
    Cost: linear in the tokens; each `add` decodes the last few again.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._skipped_token_ids = tokenizer.special_token_ids if skip_special_tokens else frozenset[int]()
        self._decode = tokenizer.decode if skip_special_tokens else tokenizer.decode_verbatim
        self._window: list[int] = []
        self._num_context = 0
        self._num_emitted = 0
        """Leading characters of the window's text that are out."""

    def add(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens make certain."""
        with_text = [token_id for token_id in token_ids if token_id not in self._skipped_token_ids]
        if not with_text:
            return ""
        self._window += with_text
        text = self._decode(self._window)
        num_held = len(text) - len(text.rstrip(REPLACEMENT))
        is_full = len(self._window) > MAX_WINDOW_TOKENS
        if is_full:
            num_held = min(num_held, MAX_UNFINISHED)
        piece = text[self._num_emitted : len(text) - num_held]
        self._num_emitted += len(piece)
        if num_held == 0:
            self._keep_last(len(self._window) - self._num_context, num_held=0)
        elif is_full:
            self._keep_last(RESYNC_TOKENS, num_held=num_held)
        return piece

    def finish(self) -> str:
        """The rest, incomplete characters as U+FFFD. Nothing may be added afterwards."""
        return self._decode(self._window)[self._num_emitted :]

    def _keep_last(self, num_tokens: int, *, num_held: int) -> None:
        """Shorten the window to tokens whose text is out but for the last `num_held` characters."""
        self._window = self._window[len(self._window) - num_tokens :]
        self._num_context = len(self._window)
        self._num_emitted = len(self._decode(self._window)) - num_held
