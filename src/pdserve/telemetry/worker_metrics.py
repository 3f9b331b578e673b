"""What a worker of any role counts. Each metric is defined in `docs/metrics.md`."""

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from pdserve.telemetry.connection_endings import ConnectionEndings
from pdserve.telemetry.draft_counters import DraftCounters
from pdserve.telemetry.instants import Instant, RequestInstants
from pdserve.telemetry.intervals import Interval, IntervalHistograms
from pdserve.telemetry.pass_clock import PassClock
from pdserve.telemetry.rank_gauges import RankGauges
from pdserve.telemetry.total import Total

WORKER_INTERVALS = (
    Interval("pdserve:grant_seconds", Instant.ACCEPTED, Instant.GRANTED, "Time until pages were granted."),
    Interval("pdserve:handoff_seconds", Instant.GRANTED, Instant.LANDED, "Time from the grant to the landing."),
    Interval("pdserve:schedule_seconds", Instant.LANDED, Instant.SCHEDULED, "Time a landed request waited for a pass."),
    Interval("pdserve:prefill_queue_seconds", Instant.ADMITTED, Instant.PREFILL_STARTED, "Time waited for prefill."),
    Interval("pdserve:prefill_seconds", Instant.PREFILL_STARTED, Instant.PREFILL_ENDED, "Time of all prefill passes."),
    Interval(
        "pdserve:handoff_exposed_seconds",
        Instant.PREFILL_ENDED,
        Instant.DRAINED,
        "Time of the transfer that the forward passes did not hide.",
    ),
)


class WorkerMetrics:
    """Lifetime: one a worker process. Threads: the event loop's only."""

    def __init__(self, *, model_name: str) -> None:
        self.registry = CollectorRegistry()
        registry = self.registry
        self._intervals = IntervalHistograms(registry, WORKER_INTERVALS, model_name=model_name)
        self._bytes_pushed = Counter(
            "pdserve:bytes_pushed_total", "KV bytes written to peers.", ("nic",), registry=registry
        )
        self._bytes_pushed_by_nic: dict[int, Total] = {}
        self._writes_failed = Total(
            Counter("pdserve:writes_failed_total", "Writes that ended with an error.", registry=registry)
        )
        self._stale_immediates = Total(
            Counter("pdserve:stale_immediates_total", "Immediates of a closed handoff.", registry=registry)
        )
        self._pushes = Gauge("pdserve:pushes_in_flight", "Writes posted and not completed.", registry=registry)
        self.ranks = RankGauges(registry)
        self._leaked = Gauge("pdserve:ledger_leaked", "What nobody owns; a bug.", ("kind",), registry=registry)
        self.drafts = DraftCounters(registry)
        self.passes = PassClock(registry)
        stale_messages = Counter(
            "pdserve:stale_messages_total", "Messages of a past incarnation or handoff.", ("sender",), registry=registry
        )
        self._stale_messages = {
            sender: Total(stale_messages.labels(sender=sender)) for sender in ("gateway", "decode", "prefill")
        }
        self._authentications_refused = Counter(
            "pdserve:authentications_refused_total",
            "Credentials that were refused.",
            ("credential",),
            registry=registry,
        )
        self.connections = ConnectionEndings(registry)
        self._local_prefills = Counter(
            "pdserve:prefill_local_total", "Prompts a decode worker prefilled itself.", ("reason",), registry=registry
        )
        self._handoffs = Counter(
            "pdserve:handoffs_total", "Handoffs of ended requests.", ("outcome",), registry=registry
        )

    def observe_authentication_refused(self, credential: str) -> None:
        """A decode worker's connection was refused."""
        self._authentications_refused.labels(credential=credential).inc()

    def set_leaked(self, num_leaked: Mapping[str, int]) -> None:
        """By kind, as of the last audit."""
        for kind, count in num_leaked.items():
            self._leaked.labels(kind=kind).set(count)

    def observe(self, instants: RequestInstants) -> None:
        """The request has ended in this process; every interval known here is counted."""
        self._intervals.observe(instants)

    def observe_local_prefill(self, reason: str) -> None:
        self._local_prefills.labels(reason=reason).inc()

    def observe_handoff(self, outcome: str) -> None:
        self._handoffs.labels(outcome=outcome).inc()

    def set_stale_messages(self, *, num_from_gateway: int, num_from_decode: int, num_from_prefill: int) -> None:
        """Totals since the worker started."""
        self._stale_messages["gateway"].set(num_from_gateway)
        self._stale_messages["decode"].set(num_from_decode)
        self._stale_messages["prefill"].set(num_from_prefill)

    def set_fabric(
        self,
        *,
        num_bytes_pushed: tuple[int, ...],
        num_writes_failed: int,
        num_stale_immediates: int,
        num_in_flight: int,
    ) -> None:
        """Totals since the fabric was opened, bytes by NIC, and the writes in flight now."""
        for nic, num_bytes in enumerate(num_bytes_pushed):
            if nic not in self._bytes_pushed_by_nic:
                self._bytes_pushed_by_nic[nic] = Total(self._bytes_pushed.labels(nic))
            self._bytes_pushed_by_nic[nic].set(num_bytes)
        self._writes_failed.set(num_writes_failed)
        self._stale_immediates.set(num_stale_immediates)
        self._pushes.set(num_in_flight)

    def exposition(self) -> bytes:
        """Prometheus text format."""
        return generate_latest(self.registry)
