"""Guesses from the sequence itself: what followed the last tokens when they came before.

Answers copy: names, quoted passages, code that is edited, lists whose entries begin alike. So the tokens at the end are
looked for earlier in the sequence, prompt and answer alike, longest match first. Four tokens are specific enough that a
longer match seldom says anything else; a single one matches nearly always and is followed by nearly anything. Of equal
matches the latest counts: what is copied is mostly copied in order, and the latest place is where that order is kept.
"""

MATCH_LENGTHS = (4, 3, 2)
_TOKEN_BITS = 32
_MASKS = tuple((1 << _TOKEN_BITS * num_tokens) - 1 for num_tokens in MATCH_LENGTHS)


class NgramIndex:
    """Of one sequence: where each run of 2, 3 and 4 tokens came last, unless nothing follows it yet.

    Cost: O(1) a token, in time and memory (some 300 bytes, a hundredth of the token's KV).
    """

    def __init__(self) -> None:
        self._num_tokens = 0
        self._last = 0
        """The last tokens as one number, each one more than it is in `_TOKEN_BITS` of its own; so what comes before the
        first token, 0, is like no token."""
        self._followers: tuple[dict[int, int], ...] = tuple({} for _ in MATCH_LENGTHS)
        """By length: the position after the latest place of these tokens."""

    def propose(self, token_ids: list[int], *, num_tokens: int) -> tuple[int, ...]:
        """So many tokens that may come next, or none. A copy that reaches its own beginning goes on with itself.

        Requires: `token_ids` begins with those of the call before.
        """
        self._catch_up(token_ids)
        for mask, followers in zip(_MASKS, self._followers, strict=True):
            place = followers.get(self._last & mask)
            if place is not None:
                period = self._num_tokens - place
                return tuple(token_ids[place + ahead % period] for ahead in range(num_tokens))
        return ()

    def _catch_up(self, token_ids: list[int]) -> None:
        by_length = list(zip(_MASKS, self._followers, strict=True))
        for position in range(self._num_tokens, len(token_ids)):
            for mask, followers in by_length:
                followers[self._last & mask] = position
            self._last = (self._last << _TOKEN_BITS | token_ids[position] + 1) & _MASKS[0]
        self._num_tokens = len(token_ids)
