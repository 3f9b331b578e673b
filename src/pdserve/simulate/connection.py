"""Control connections between processes: ordered each way, delayed, held back by partitions, and cut.

As over TCP: what is sent while a direction is blocked arrives when it opens again, if the connection still lives then.
When a connection is cut or a process dies, some of what was under way still arrives, then the end. A blocked direction
holds that back too, so that only silence tells.
"""

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from pdserve.simulate.agenda import Action, Agenda
from pdserve.simulate.journal import Journal
from pdserve.simulate.process import Process
from pdserve.units import NS_PER_MS, NS_PER_S, NS_PER_US
from pdserve.wire.peer import Message

MIN_DELAY_NS = 50 * NS_PER_US
DIAL_TIMEOUT_NS = 5 * NS_PER_S


class End:
    """One side of a connection. Its owner sets what is called for a message, and at the end (once)."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.is_open = True
        self.last_heard_ns = process.now_ns
        self.on_message: Callable[[Message], None] = _drop
        self.on_end: Callable[[], None] = _nothing
        self.outgoing: Direction

    def send(self, message: Message) -> None:
        """Never blocks; nothing is sent once the connection has ended here."""
        if self.is_open:
            self.outgoing.send(message)

    def close(self) -> None:
        """End it from this side; the owner hears of it as of any other end."""
        if self.is_open:
            self.outgoing.send(None)
            self._end()

    def receive(self, message: Message | None) -> None:
        """None: the other side is gone."""
        if not self.is_open:
            return
        self.last_heard_ns = self.process.now_ns
        if message is None:
            self.outgoing.send(None)
            self._end()
        else:
            self.on_message(message)

    def is_silent_for(self, duration_ns: int) -> bool:
        return self.process.now_ns - self.last_heard_ns >= duration_ns

    def _end(self) -> None:
        self.is_open = False
        self.process.after(0, lambda: self.on_end())


@dataclass(slots=True, eq=False)
class Direction:
    network: "ControlNetwork"
    source: Process
    target: End
    in_flight: deque[Message | None] = field(default_factory=deque[Message | None])
    num_held: int = 0
    last_arrival_ns: int = 0

    def send(self, message: Message | None) -> None:
        network = self.network
        network.remember(self.source, self.target.process, message)
        self.in_flight.append(message)
        now_ns = network.agenda.now_ns
        self.last_arrival_ns = max(now_ns + network.draw_delay_ns(), self.last_arrival_ns)
        network.agenda.after(self.last_arrival_ns - now_ns, self._arrive)

    def cut(self) -> None:
        """The last few messages under way are lost, and the end comes."""
        for _ in range(self.network.draw.randint(0, len(self.in_flight))):
            self.in_flight.pop()
        self.send(None)

    def release(self) -> None:
        """It is not blocked any more."""
        num_held, self.num_held = self.num_held, 0
        for _ in range(num_held):
            self._hand_over()

    def _arrive(self) -> None:
        if self.num_held or self.network.is_blocked(self.source, self.target.process):
            self.num_held += 1
        else:
            self._hand_over()

    def _hand_over(self) -> None:
        if self.in_flight:
            message = self.in_flight.popleft()
            self.target.process.do(lambda: self.target.receive(message))


class ControlNetwork:
    """All control connections of the world."""

    def __init__(self, agenda: Agenda, draw: random.Random, journal: Journal) -> None:
        self.agenda = agenda
        self.draw = draw
        self.max_delay_ns = NS_PER_MS
        self.listeners: dict[str, tuple[Process, Callable[[End], None]]] = {}
        """Who takes connections, by name."""
        self.sent: list[tuple[str, str, Message]] = []
        """All that was ever sent but heartbeats, with the names of sender and receiver."""
        self._journal = journal
        self._directions: list[Direction] = []
        self._blocked: set[tuple[str, str]] = set()

    @property
    def num_ending(self) -> int:
        """Directions in which the end of a connection is on its way."""
        return sum(direction.target.is_open and None in direction.in_flight for direction in self._directions)

    def draw_delay_ns(self) -> int:
        return self.draw.randint(MIN_DELAY_NS, self.max_delay_ns)

    def dial(self, process: Process, name: str, on_connected: Callable[[End], None], on_failed: Action) -> None:
        """Exactly one of the two is called, in `process`."""
        process.after(self.draw_delay_ns(), lambda: self._connect(process, name, on_connected, on_failed))

    def _connect(self, process: Process, name: str, on_connected: Callable[[End], None], on_failed: Action) -> None:
        listener, accept = self.listeners.get(name, (None, None))
        if listener is None or accept is None or not listener.is_alive:
            on_failed()
        elif self.is_blocked(process, listener) or self.is_blocked(listener, process):
            process.after(DIAL_TIMEOUT_NS, on_failed)
        else:
            ours, theirs = End(process), End(listener)
            ours.outgoing, theirs.outgoing = Direction(self, process, theirs), Direction(self, listener, ours)
            self._directions = [direction for direction in self._directions if direction.target.is_open]
            self._directions += [ours.outgoing, theirs.outgoing]
            on_connected(ours)
            listener.do(lambda: accept(theirs))

    def cut(self, first: str, second: str) -> None:
        """End the connections of two processes, for no fault of theirs."""
        for direction in self._directions:
            if {direction.source.name, direction.target.process.name} == {first, second} and direction.target.is_open:
                direction.cut()

    def leave(self, process: Process) -> None:
        """The process exits; what it said before arrives, then the end."""
        for direction in self._directions:
            if direction.source is process:
                direction.send(None)

    def lose(self, process: Process) -> None:
        """The process died; those at the other ends hear of it."""
        for direction in self._directions:
            if direction.source is process:
                direction.cut()

    def block(self, source: str, target: str) -> None:
        self._blocked.add((source, target))

    def unblock(self, source: str, target: str) -> None:
        self._blocked.discard((source, target))
        for direction in list(self._directions):
            if (direction.source.name, direction.target.process.name) == (source, target):
                direction.release()

    def is_blocked(self, source: Process, target: Process) -> bool:
        return (source.name, target.name) in self._blocked

    def remember(self, source: Process, target: Process, message: Message | None) -> None:
        if message is None:
            self._journal.note(source.name, f"ends its connection to {target.name}")
        elif not is_heartbeat(message):
            self._journal.note(source.name, f"to {target.name}:", message)
            self.sent.append((source.name, target.name, message))


def is_heartbeat(message: Message) -> bool:
    return type(message).__name__.endswith("Heartbeat")


def _drop(message: Message) -> None:
    del message


def _nothing() -> None:
    pass
