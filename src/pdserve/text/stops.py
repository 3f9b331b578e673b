"""Stop strings in a text that comes in pieces."""

from collections.abc import Sequence

from pdserve.errors import InvalidField


class StopMatcher:
    """Finds the first stop string to be complete, however the text is cut; of two complete at once, the longer one.

    Each stop string is followed by a Knuth-Morris-Pratt automaton, so that the text held back is exactly the longest
    end that a stop string begins with, and a text made to nearly match costs no more than any other.

    Raises: `InvalidField` for an empty stop string.
    Cost: amortised O(number of stop strings) a character.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if "" in stops:
            raise InvalidField("a stop string is empty", param="stop")
        self._automata = [_StopAutomaton(stop) for stop in stops]
        self._held = ""
        self._found = False

    def feed(self, text: str, *, may_stop: bool = True) -> tuple[str, bool]:
        """The text that can't be part of a stop string any more, and True once one is complete.

        The text then ends where the stop string begins; whatever is fed afterwards gives nothing. A stop string that is
        complete within a text that may not stop is text like any other.
        """
        if self._found or not text:
            return "", self._found
        self._held += text
        for position in range(len(self._held) - len(text), len(self._held)):
            num_stopped = max((a.advance(self._held[position]) for a in self._automata), default=0)
            if num_stopped and may_stop:
                self._found = True
                before = self._held[: position + 1 - num_stopped]
                self._held = ""
                return before, True
        num_kept = max((automaton.num_matched for automaton in self._automata), default=0)
        released = self._held[: len(self._held) - num_kept]
        self._held = self._held[len(self._held) - num_kept :]
        return released, False

    def finish(self) -> str:
        """The text held back: the output ended before a stop string was complete."""
        held, self._held = self._held, ""
        return held


class _StopAutomaton:
    """How much of one stop string the text read so far ends with."""

    def __init__(self, stop: str) -> None:
        self._stop = stop
        self._fallbacks = _fallbacks(stop)
        self.num_matched = 0

    def advance(self, character: str) -> int:
        """The length of the stop string when it is complete with this character, else 0."""
        while self.num_matched and self._stop[self.num_matched] != character:
            self.num_matched = self._fallbacks[self.num_matched - 1]
        if self._stop[self.num_matched] == character:
            self.num_matched += 1
        if self.num_matched < len(self._stop):
            return 0
        self.num_matched = self._fallbacks[-1]
        return len(self._stop)


def _fallbacks(stop: str) -> list[int]:
    """For each prefix, the length of the longest proper prefix that it also ends with."""
    fallbacks = [0] * len(stop)
    num_matched = 0
    for position in range(1, len(stop)):
        while num_matched and stop[position] != stop[num_matched]:
            num_matched = fallbacks[num_matched - 1]
        if stop[position] == stop[num_matched]:
            num_matched += 1
        fallbacks[position] = num_matched
    return fallbacks
