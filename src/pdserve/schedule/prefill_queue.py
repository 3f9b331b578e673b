"""The order in which prompts are computed: shortest remaining first, with ageing.

Why shortest remaining first: of all orders it gives the least mean waiting time. A 50-token prompt that waits for one
of 2,000 tokens waits forty times its own time; the long one that lets ten short ones pass waits a quarter longer. Since
the order is taken anew at each chunk, a short prompt overtakes a long one that has begun.

Why ageing: alone, that order starves a long prompt as long as short ones keep coming. So a prompt that has waited for t
seconds counts as `ageing_tokens_per_s * t` tokens shorter:

    remaining - ageing * (now - arrival)

All prompts age alike, so of two the first stays the first whatever `now` is, and the queue sorts by

    remaining + ageing * arrival

which only a computed chunk changes. A prompt with r tokens remaining is therefore overtaken only by prompts that arrive
less than r / ageing seconds after it: what can go before it is bounded from the moment it arrives.

Preempted sequences come before all others: their clients have seen tokens already and now see a gap.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass

from pdserve.ids import SequenceId
from pdserve.schedule.sequence import Sequence
from pdserve.units import NS_PER_S


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Where a sequence stands, as it was when it was put there."""

    rank: tuple[bool, int, SequenceId]
    num_tokens: int
    sequence: Sequence


class PrefillQueue:
    """Sequences with a prompt to compute, in the order in which the next chunk is chosen.

    Units: ranks are in billionths of a token, so that they are exact integers.
    Cost: O(log n) comparisons and a memmove of n words for each change.
    """

    def __init__(self, *, ageing_tokens_per_s: int) -> None:
        self._ageing_tokens_per_s = ageing_tokens_per_s
        self._ranks: list[tuple[bool, int, SequenceId]] = []
        self._places: dict[SequenceId, _Place] = {}
        self.num_tokens = 0
        """Tokens still to be computed, over all sequences."""

    def __len__(self) -> int:
        return len(self._ranks)

    def __contains__(self, sequence_id: SequenceId) -> bool:
        return sequence_id in self._places

    def __iter__(self) -> Iterator[Sequence]:
        return (self._places[sequence_id].sequence for _, _, sequence_id in self._ranks)

    def add(self, sequence: Sequence, *, preempted: bool = False) -> None:
        score = sequence.num_uncomputed * NS_PER_S + self._ageing_tokens_per_s * sequence.arrival_ns
        place = _Place(
            rank=(not preempted, score, sequence.sequence_id), num_tokens=sequence.num_uncomputed, sequence=sequence
        )
        self._places[sequence.sequence_id] = place
        insort(self._ranks, place.rank)
        self.num_tokens += place.num_tokens

    def reorder(self, sequence: Sequence) -> None:
        """Give a sequence the place that its remaining tokens now deserve."""
        preempted = not self._places[sequence.sequence_id].rank[0]
        self.discard(sequence.sequence_id)
        self.add(sequence, preempted=preempted)

    def discard(self, sequence_id: SequenceId) -> None:
        """Afterwards the sequence is not in the queue, whether it was or not."""
        place = self._places.pop(sequence_id, None)
        if place is not None:
            del self._ranks[bisect_left(self._ranks, place.rank)]
            self.num_tokens -= place.num_tokens
