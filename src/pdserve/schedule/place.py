"""Where in the scheduler a sequence is."""

from dataclasses import dataclass
from enum import Enum

from pdserve.schedule.sequence import Sequence


class Place(Enum):
    WAITING = "waiting"
    """Has no pages."""
    PREEMPTED = "preempted"
    """As WAITING; it ran before."""
    HANDED_OVER = "handed_over"
    """Has pages with all KV but the last token's; waits for a running slot."""
    RUNNING = "running"
    """Has pages and a running slot."""
    REMOVING = "removing"
    """As RUNNING; nobody wants it any more, and it goes when the running pass ends."""


@dataclass(frozen=True, slots=True)
class Placed:
    place: Place
    sequence: Sequence
