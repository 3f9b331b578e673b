"""How long the ranks of a worker were in forward passes: over the time between two looks, how busy they were."""

from prometheus_client import CollectorRegistry, Counter

from pdserve.units import ns_to_seconds


class PassClock:
    """Threads: the event loop's only."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._seconds = Counter(
            "pdserve:pass_seconds_total", "Time in forward passes.", ("dp_rank",), registry=registry
        )

    def observe(self, dp_rank: int, *, started_ns: int, ended_ns: int) -> None:
        """Of one pass."""
        self._seconds.labels(dp_rank).inc(ns_to_seconds(ended_ns - started_ns))
