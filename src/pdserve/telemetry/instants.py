"""The named instants of a request. Every duration that pdserve reports is the difference of two of them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType

from pdserve.units import ns_to_seconds


class Instant(Enum):
    """In the order of a request's way when the prompt is prefilled remotely; each is taken by one process."""

    RECEIVED = "received"
    """Gateway: the request's head was read."""
    TOKENIZED = "tokenized"
    """Gateway: the prompt's token ids are known."""
    DISPATCHED = "dispatched"
    """Gateway: the request was handed to the connection of a decode worker; the last time, after a retry."""
    ACCEPTED = "accepted"
    """Decode worker: the request was read."""
    GRANTED = "granted"
    """Decode worker: pages are allocated and the grant was handed to the connection of a prefill worker."""
    ADMITTED = "admitted"
    """Prefill worker: the grant was accepted."""
    PREFILL_STARTED = "prefill_started"
    """Whoever prefills: the first pass with a chunk of the prompt began."""
    PREFILL_ENDED = "prefill_ended"
    """Whoever prefills: the last pass with a chunk of the prompt ended."""
    DRAINED = "drained"
    """Prefill worker: the last write completed locally; the pages were released."""
    LANDED = "landed"
    """Decode worker: every expected write was counted; the request is schedulable."""
    SCHEDULED = "scheduled"
    """Decode worker: the first pass that samples a token of the request began."""
    FIRST_TOKEN = "first_token"
    """Gateway: the first token arrived (not streaming) or its first byte was handed to the client's connection."""
    LAST_TOKEN = "last_token"
    """Gateway: as `FIRST_TOKEN`, of the last token."""
    FINISHED = "finished"
    """Whoever ends the request: nothing of it is left in this process."""


@dataclass(frozen=True, slots=True)
class RequestInstants:
    """What one process knows of one request. Units: ns of `CLOCK_MONOTONIC`, so they compare within a machine only."""

    times_ns: Mapping[Instant, int] = field(default_factory=lambda: MappingProxyType({}))

    def at(self, instant: Instant, now_ns: int) -> "RequestInstants":
        """These instants and one more; an instant that was there is replaced."""
        return RequestInstants(MappingProxyType({**self.times_ns, instant: now_ns}))

    def seconds_between(self, start: Instant, stop: Instant) -> float | None:
        """None while one of the two is unknown."""
        start_ns, stop_ns = self.times_ns.get(start), self.times_ns.get(stop)
        if start_ns is None or stop_ns is None:
            return None
        return ns_to_seconds(stop_ns - start_ns)
