"""Connections that a process ended because nothing was asked on them."""

from prometheus_client import CollectorRegistry, Counter


class ConnectionEndings:
    """Threads: the event loop's only."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._ended = Counter(
            "pdserve:connections_ended_total",
            "Connections ended while nothing was asked on them.",
            ("reason",),
            registry=registry,
        )

    def observe(self, reason: str) -> None:
        self._ended.labels(reason=reason).inc()
