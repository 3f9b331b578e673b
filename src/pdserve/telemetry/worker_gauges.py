"""How full each data parallel rank of each worker is, as a gateway shows it from the last heartbeats."""

from prometheus_client import CollectorRegistry, Gauge


class WorkerGauges:
    """Threads: the event loop's only."""

    def __init__(self, registry: CollectorRegistry, *, model_name: str) -> None:
        self._model_name = model_name
        labels = ("model_name", "worker", "dp_rank")
        self._workers = Gauge("pdserve:workers", "Workers with a live lease.", ("role",), registry=registry)
        self._running = Gauge("vllm:num_requests_running", "Sequences being generated.", labels, registry=registry)
        self._waiting = Gauge("vllm:num_requests_waiting", "Sequences not started yet.", labels, registry=registry)
        self._kv_usage = Gauge("vllm:kv_cache_usage_perc", "Used share of the pages.", labels, registry=registry)
        self._quarantined = Gauge("pdserve:quarantined_pages", "Pages in quarantine.", labels, registry=registry)

    def clear(self) -> None:
        """Forget all workers; add each live one and its ranks then."""
        for gauge in (self._workers, self._running, self._waiting, self._kv_usage, self._quarantined):
            gauge.clear()

    def add_worker(self, role: str) -> None:
        self._workers.labels(role=role).inc()

    def add_rank(
        self,
        worker_id: str,
        *,
        dp_rank: int,
        num_running: int,
        num_waiting: int,
        num_pages: int,
        num_free_pages: int,
        num_quarantined_pages: int,
    ) -> None:
        labels = {"model_name": self._model_name, "worker": worker_id, "dp_rank": str(dp_rank)}
        self._running.labels(**labels).set(num_running)
        self._waiting.labels(**labels).set(num_waiting)
        self._kv_usage.labels(**labels).set((num_pages - num_free_pages) / num_pages if num_pages else 0.0)
        self._quarantined.labels(**labels).set(num_quarantined_pages)
