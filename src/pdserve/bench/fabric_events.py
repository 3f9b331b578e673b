"""Waiting for a fabric's events with a deadline."""

import select
import time
from typing import TypeVar

from pdserve.errors import HandoffTimeout, InternalError
from pdserve.fabric.port import Fabric, FabricEvent
from pdserve.units import NS_PER_MS, seconds_to_ns

DEADLINE_S = 60.0

Event = TypeVar("Event", bound=FabricEvent)


def await_events(fabric: Fabric, kind: type[Event], num_events: int) -> list[Event]:
    """The next `num_events`. Raises: `HandoffTimeout`, or `InternalError` at an event of another kind."""
    deadline_ns = time.monotonic_ns() + seconds_to_ns(DEADLINE_S)
    poller = select.poll()
    poller.register(fabric.fileno(), select.POLLIN)
    seen: list[Event] = []
    while len(seen) < num_events:
        remaining_ms = (deadline_ns - time.monotonic_ns()) // NS_PER_MS
        if remaining_ms <= 0 or not poller.poll(remaining_ms):
            raise HandoffTimeout(f"{len(seen)} of {num_events} {kind.__name__} events came within {DEADLINE_S:.0f} s")
        for event in fabric.poll():
            if not isinstance(event, kind):
                raise InternalError(f"expected {kind.__name__}, got {event}")
            seen.append(event)
    return seen
