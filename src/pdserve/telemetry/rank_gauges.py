"""How full each data parallel rank of a worker is."""

from prometheus_client import CollectorRegistry, Gauge


class RankGauges:
    """Threads: the event loop's only."""

    def __init__(self, registry: CollectorRegistry) -> None:
        labels = ("dp_rank",)
        self._running = Gauge("pdserve:sequences_running", "Sequences in passes.", labels, registry=registry)
        self._waiting = Gauge("pdserve:sequences_waiting", "Sequences not started yet.", labels, registry=registry)
        self._free_pages = Gauge("pdserve:free_pages", "Pages nobody holds.", labels, registry=registry)
        self._quarantined = Gauge(
            "pdserve:quarantined_pages", "Pages a lost peer may still write to.", labels, registry=registry
        )

    def set(
        self, dp_rank: int, *, num_running: int, num_waiting: int, num_free_pages: int, num_quarantined_pages: int
    ) -> None:
        self._running.labels(dp_rank).set(num_running)
        self._waiting.labels(dp_rank).set(num_waiting)
        self._free_pages.labels(dp_rank).set(num_free_pages)
        self._quarantined.labels(dp_rank).set(num_quarantined_pages)
