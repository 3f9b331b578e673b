"""What one in-process fabric receives: counted arrivals, events, and memory that others may write to."""

import os
from collections import Counter
from dataclasses import dataclass

from pdserve.fabric.arrivals import Arrivals
from pdserve.fabric.port import FabricEvent, Fenced, RegionDescriptor
from pdserve.ids import Immediate
from pdserve.shared_region import SharedRegion


class Inbox:
    """Events wait here for `poll`; `event_fd` is readable while there are any. Nothing comes in once it is dead."""

    def __init__(self) -> None:
        self.is_alive = True
        self.arrivals = Arrivals()
        self.num_received_by_nic: Counter[int] = Counter()
        self.event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._events: list[FabricEvent] = []

    def emit(self, event: FabricEvent | None) -> None:
        if event is None or not self.is_alive:
            return
        self._events.append(event)
        if len(self._events) == 1:
            os.eventfd_write(self.event_fd, 1)

    def arrive(self, immediate: Immediate, nic: int, now_ns: int) -> None:
        self.num_received_by_nic[nic] += 1
        self.emit(self.arrivals.arrive(immediate, now_ns))

    def take_events(self) -> list[FabricEvent]:
        events, self._events = self._events, []
        if events:
            os.eventfd_read(self.event_fd)
        return events

    def close(self) -> None:
        self.is_alive = False
        self._events.clear()
        if self.event_fd >= 0:
            os.close(self.event_fd)
            self.event_fd = -1


@dataclass(slots=True, eq=False)
class Exposure:
    """A region under a key for each NIC. Once it is closed no write begins, and `Fenced` follows the last that had
    begun.
    """

    owner: Inbox
    region: SharedRegion
    descriptor: RegionDescriptor
    num_in_flight: int = 0
    is_closed: bool = False

    def write_ended(self) -> None:
        self.num_in_flight -= 1
        self._emit_if_settled()

    def close(self) -> None:
        self.is_closed = True
        self._emit_if_settled()

    def _emit_if_settled(self) -> None:
        if self.is_closed and self.num_in_flight == 0:
            self.owner.emit(Fenced(exposure=self.descriptor))
