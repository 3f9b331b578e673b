"""Copies of pages that forked sequences wait for.

A source belongs to the copies too until the batch with the copy is completed: its sequence may end before, and the page
would be granted to a handoff and overwritten. The target is the forked sequence's. A copy goes with the first chunk of
its sequence, so that a sequence that can be removed at once has no copy under way into its page.
"""

from collections.abc import Iterable
from enum import Enum

from pdserve.ids import PageIndex, SequenceId
from pdserve.kv.pages import PagePool
from pdserve.schedule.batch import PageCopy


class CopyPhase(Enum):
    WAITING = "waiting"
    """For the first chunk of its sequence."""
    RUNNING = "running"
    """In the running batch."""


class Copies:
    """Threads: one."""

    def __init__(self, *, pool: PagePool) -> None:
        self._pool = pool
        self._waiting: dict[SequenceId, PageCopy] = {}
        self._running: list[PageCopy] = []

    @property
    def held(self) -> tuple[tuple[CopyPhase, PageCopy], ...]:
        """Each owns its source."""
        waiting = ((CopyPhase.WAITING, copy) for copy in self._waiting.values())
        return (*waiting, *((CopyPhase.RUNNING, copy) for copy in self._running))

    def add(self, sequence_id: SequenceId, *, source: PageIndex, target: PageIndex) -> None:
        self._pool.share([source])
        self._waiting[sequence_id] = PageCopy(source=source, target=target)

    def cancel(self, sequence_id: SequenceId) -> None:
        """Afterwards no copy waits for the sequence, whether one did or not."""
        copy = self._waiting.pop(sequence_id, None)
        if copy is not None:
            self._pool.release([PageIndex(copy.source)])

    def start(self, sequence_ids: Iterable[SequenceId]) -> tuple[PageCopy, ...]:
        """What must be copied before these sequences are computed."""
        if not self._waiting:
            return ()
        self._running = [self._waiting.pop(sequence_id) for sequence_id in sequence_ids if sequence_id in self._waiting]
        return tuple(self._running)

    def finish(self) -> None:
        """The batch that `start` was for is completed."""
        if self._running:
            self._pool.release([PageIndex(copy.source) for copy in self._running])
            self._running.clear()
