"""Time as a port: a worker reads the system's clock, tests and the simulator a virtual one."""

import time
from typing import Protocol


class Clock(Protocol):
    def now_ns(self) -> int:
        """Nanoseconds on a monotonic scale whose zero means nothing."""
        ...


class SystemClock:
    """`CLOCK_MONOTONIC`: the same scale in every process of one machine, so instants of two workers compare."""

    def now_ns(self) -> int:
        return time.monotonic_ns()


class VirtualClock:
    """A clock that moves only when told to."""

    def __init__(self, start_ns: int = 0) -> None:
        self._now_ns = start_ns

    def now_ns(self) -> int:
        return self._now_ns

    def advance_ns(self, duration_ns: int) -> None:
        if duration_ns < 0:
            raise ValueError(f"time does not run backwards: {duration_ns} ns")
        self._now_ns += duration_ns
