"""What a network in memory draws and when it happens: seeded faults, and an agenda on a clock."""

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass

from pdserve.clock import Clock


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFaults:
    """What the network does to writes; by default nothing: a write lands and completes when it is posted."""

    min_delay_ns: int = 0
    max_delay_ns: int = 0
    reorder: bool = False
    """Writes to one peer may overtake each other."""
    write_failure_probability: float = 0.0
    """Of each write to fail, and with it its peer."""


class Timeline:
    """Deterministic: the same calls on the same clock draw and do the same."""

    def __init__(self, seed: int, clock: Clock, faults: MemoryFaults) -> None:
        self.clock = clock
        self.faults = faults
        self._random = random.Random(seed)
        self._agenda: list[tuple[int, int, Callable[[int], None]]] = []
        self._num_scheduled = 0

    def schedule(self, at_ns: int, action: Callable[[int], None]) -> None:
        """Have `action` called with `at_ns` once somebody finds that instant passed."""
        self._num_scheduled += 1
        heapq.heappush(self._agenda, (at_ns, self._num_scheduled, action))

    def next_ns(self) -> int | None:
        """When the next action is due; None: never."""
        return self._agenda[0][0] if self._agenda else None

    def do_next(self, *, until_ns: int) -> int | None:
        """The instant of the action that was done; None when none is due at `until_ns`."""
        if not self._agenda or self._agenda[0][0] > until_ns:
            return None
        at_ns, _, action = heapq.heappop(self._agenda)
        action(at_ns)
        return at_ns

    def draw_delay_ns(self) -> int:
        return self._random.randint(self.faults.min_delay_ns, self.faults.max_delay_ns)

    def draw_failure(self) -> bool:
        return self._random.random() < self.faults.write_failure_probability

    def draw_key(self) -> int:
        return self._random.getrandbits(64)
