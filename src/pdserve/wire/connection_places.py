"""How many HTTP connections a process holds at a time, and which of them goes when one more comes."""

import resource
from collections.abc import Callable, Generator
from contextlib import contextmanager
from enum import Enum


class Ending(Enum):
    """Why we ended a connection of which nothing was asked."""

    NO_REQUEST = "no_request"
    """The head of its first request was not there in time."""
    DISPLACED = "displaced"
    """It waited longest when one more came than there are places."""
    FULL = "full"
    """It came when every place had a request."""


class ConnectionPlaces:
    """A connection that has no request under way waits; who comes takes the place of the one that waits longest.

    So a flood of silent connections displaces silent connections: one that sends its request at once is served.
    """

    def __init__(self, *, max_connections: int, on_ended: Callable[[Ending], None]) -> None:
        self.max_connections = max_connections
        self.num_taken = 0
        self.on_ended = on_ended
        self._waiting: dict[Place, None] = {}

    def take(self, close: Callable[[], None]) -> "Place | None":
        """A place for one more connection, which `close` ends; None, and it has to go, when none waits for another."""
        if self.num_taken >= self.max_connections:
            longest = next(iter(self._waiting), None)
            if longest is None:
                self.on_ended(Ending.FULL)
                return None
            longest.end(Ending.DISPLACED)
        place = Place(self, close)
        self.num_taken += 1
        self._waiting[place] = None
        return place

    def waits(self, place: "Place") -> None:
        """It goes to the end of the line."""
        self._waiting[place] = None

    def works(self, place: "Place") -> None:
        self._waiting.pop(place, None)

    def free(self, place: "Place") -> None:
        self._waiting.pop(place, None)
        self.num_taken -= 1


class Place:
    """What one connection has of the places."""

    __slots__ = ("_asked", "_close", "_places", "_taken")

    def __init__(self, places: ConnectionPlaces, close: Callable[[], None]) -> None:
        self._places = places
        self._close = close
        self._taken = True
        self._asked = False

    @contextmanager
    def request(self) -> Generator[None]:
        """Around the work for one request."""
        self._asked = True
        self._places.works(self)
        try:
            yield
        finally:
            if self._taken:
                self._places.waits(self)

    def head_is_due(self) -> None:
        """The connection goes when its first request is not there by now."""
        if not self._asked:
            self.end(Ending.NO_REQUEST)

    def end(self, ending: Ending) -> None:
        """Close the connection, and count that; nothing where it is over."""
        if self._taken:
            self.leave()
            self._places.on_ended(ending)
            self._close()

    def leave(self) -> None:
        """The connection is over. Idempotent."""
        if self._taken:
            self._taken = False
            self._places.free(self)


def afford_connections(wanted: int) -> int:
    """How many connections this process may hold, `wanted` at most; raises its limit of descriptors for them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    raised, num_connections = affordable_connections(wanted, soft=soft, hard=hard)
    if raised != soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
    return num_connections


def affordable_connections(wanted: int, *, soft: int, hard: int) -> tuple[int, int]:
    """The soft limit of descriptors to set, and the connections within it: half of them, the rest is for all else."""
    if soft == resource.RLIM_INFINITY:
        return soft, wanted
    if soft < 2 * wanted:
        soft = 2 * wanted if hard == resource.RLIM_INFINITY else max(soft, min(2 * wanted, hard))
    return soft, min(wanted, soft // 2)
