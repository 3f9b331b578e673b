"""Who comes first, of many whose places change often."""

from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

from pdserve.ids import WorkerId

RankKey = tuple[WorkerId, int]
"""A worker and one of its data parallel ranks."""

Figures = TypeVar("Figures", bound=tuple[int, ...])

MIN_OUTDATED = 64
"""So few outdated entries cost less than to throw them out."""


class Order(Generic[Figures]):
    """Ranks by ascending figures, equals by worker and rank.

    A heap, in which outdated entries stay until they come to its top or outnumber the others.
    Cost: O(log n) a change and, amortised, a look; O(log n) more for each rank that is left out.
    """

    def __init__(self) -> None:
        self._figures: dict[RankKey, Figures] = {}
        self._heap: list[tuple[Figures, RankKey]] = []

    @property
    def num_kept(self) -> int:
        """Entries of the heap, the outdated ones too."""
        return len(self._heap)

    def put(self, rank: RankKey, figures: Figures) -> None:
        """The rank has these figures from now on."""
        if self._figures.get(rank) == figures:
            return
        self._figures[rank] = figures
        heappush(self._heap, (figures, rank))
        if len(self._heap) > 2 * len(self._figures) + MIN_OUTDATED:
            self._heap = [(figures, rank) for rank, figures in self._figures.items()]
            heapify(self._heap)

    def discard(self, rank: RankKey) -> None:
        """The rank is gone, if it was here."""
        self._figures.pop(rank, None)

    def first(self, *, is_allowed: Callable[[RankKey], bool]) -> RankKey | None:
        """The first of those that are allowed; None when none is."""
        passed_over: list[tuple[Figures, RankKey]] = []
        found = None
        while self._heap and found is None:
            entry = figures, rank = self._heap[0]
            if self._figures.get(rank) != figures:
                heappop(self._heap)
            elif is_allowed(rank):
                found = rank
            else:
                passed_over.append(entry)
                heappop(self._heap)
        for entry in passed_over:
            heappush(self._heap, entry)
        return found
