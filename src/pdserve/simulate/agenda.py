"""What happens when: actions at instants of a virtual clock, in order of time, then of their scheduling."""

import heapq
from collections.abc import Callable

from pdserve.clock import VirtualClock

Action = Callable[[], None]


class Agenda:
    def __init__(self, clock: VirtualClock) -> None:
        self.clock = clock
        self._entries: list[tuple[int, int, Action]] = []
        self._num_added = 0

    @property
    def now_ns(self) -> int:
        return self.clock.now_ns()

    @property
    def next_ns(self) -> int | None:
        """When the next action is due; None: never."""
        return self._entries[0][0] if self._entries else None

    def after(self, delay_ns: int, action: Action) -> None:
        self._num_added += 1
        heapq.heappush(self._entries, (self.now_ns + delay_ns, self._num_added, action))

    def do_next(self) -> None:
        """Requires: an action, which is due."""
        heapq.heappop(self._entries)[2]()
