"""What a gateway counts. Each metric is defined in `docs/metrics.md`."""

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from pdserve.telemetry.connection_endings import ConnectionEndings
from pdserve.telemetry.instants import Instant, RequestInstants
from pdserve.telemetry.intervals import Interval, IntervalHistograms, latency_histogram
from pdserve.telemetry.lengths import LengthHistograms
from pdserve.telemetry.total import Total
from pdserve.telemetry.worker_gauges import WorkerGauges
from pdserve.units import ns_to_seconds

GATEWAY_INTERVALS = (
    Interval(
        "vllm:time_to_first_token_seconds",
        Instant.RECEIVED,
        Instant.FIRST_TOKEN,
        "Time to the first token of the answer.",
    ),
    Interval("vllm:e2e_request_latency_seconds", Instant.RECEIVED, Instant.FINISHED, "Time to the end of the answer."),
    Interval("pdserve:tokenize_seconds", Instant.RECEIVED, Instant.TOKENIZED, "Time to read, check and tokenize."),
    Interval("pdserve:dispatch_seconds", Instant.TOKENIZED, Instant.DISPATCHED, "Time to the last dispatch."),
)


class GatewayMetrics:
    """Lifetime: one a gateway. Threads: the event loop's only."""

    def __init__(self, *, model_name: str) -> None:
        self.registry = CollectorRegistry()
        registry = self.registry
        self._model_name = model_name
        self._intervals = IntervalHistograms(registry, GATEWAY_INTERVALS, model_name=model_name)
        self._token_gaps = (
            latency_histogram(
                registry, "vllm:inter_token_latency_seconds", "Gap between two tokens.", model_name=model_name
            ),
            latency_histogram(
                registry, "vllm:time_per_output_token_seconds", "The same, by its older name.", model_name=model_name
            ),
        )
        self._mean_gap = latency_histogram(
            registry, "vllm:request_time_per_output_token_seconds", "Mean gap of one request.", model_name=model_name
        )
        self._lengths = LengthHistograms(registry, model_name=model_name)
        self._prompt_tokens = self._model_counter("vllm:prompt_tokens_total", "Prompt tokens of finished requests.")
        self._generation_tokens = self._model_counter("vllm:generation_tokens_total", "Generated tokens.")
        self._finished = self._counter(
            "vllm:request_success_total", "Requests answered in full.", "model_name", "finished_reason"
        )
        self._failed = self._counter("pdserve:requests_failed_total", "Requests refused or failed.", "code")
        self._cancelled = self._counter("pdserve:requests_cancelled_total", "Requests whose client left.")
        self._retries = Total(self._counter("pdserve:request_retries_total", "Requests sent to another rank."))
        self._prefills = self._counter("pdserve:prefills_total", "Where prompts were prefilled.", "place")
        self._stale = self._counter("pdserve:stale_messages_total", "Messages of a past connection or request.", "kind")
        self._protocol_errors = self._counter(
            "pdserve:protocol_errors_total", "Connections of workers that broke the protocol."
        )
        self._authentications_refused = self._counter(
            "pdserve:authentications_refused_total", "Credentials that were refused.", "credential"
        )
        self.connections = ConnectionEndings(registry)
        self._pending = Gauge("pdserve:requests_pending", "Requests not ended yet.", registry=registry)
        self._leaked = Gauge("pdserve:ledger_leaked", "What nobody owns; a bug.", ("kind",), registry=registry)
        self.workers = WorkerGauges(registry, model_name=model_name)

    def observe_finished(
        self,
        instants: RequestInstants,
        *,
        finish_reason: str,
        num_prompt_tokens: int,
        num_generated_tokens: int,
        mean_gap_s: float | None,
    ) -> None:
        """A request was answered in full; `mean_gap_s` is None where no choice has two tokens."""
        self._intervals.observe(instants)
        if mean_gap_s is not None:
            self._mean_gap.observe(mean_gap_s)
        self._lengths.observe(num_prompt_tokens=num_prompt_tokens, num_generated_tokens=num_generated_tokens)
        self._prompt_tokens.inc(num_prompt_tokens)
        self._finished.labels(model_name=self._model_name, finished_reason=finish_reason).inc()

    def observe_tokens(self, num_tokens: int, *, gap_ns: int | None) -> None:
        """Tokens of one delta; `gap_ns` is the time since the delta before, None for the first."""
        self._generation_tokens.inc(num_tokens)
        if gap_ns is not None and num_tokens:
            for histogram in self._token_gaps:
                histogram.observe(ns_to_seconds(gap_ns))

    def observe_failed(self, code: str) -> None:
        self._failed.labels(code=code).inc()

    def observe_cancelled(self) -> None:
        self._cancelled.inc()

    def observe_prefill(self, place: str) -> None:
        self._prefills.labels(place=place).inc()

    def observe_stale(self, kind: str) -> None:
        self._stale.labels(kind=kind).inc()

    def observe_protocol_error(self) -> None:
        """A worker's connection is ended because of what it sent."""
        self._protocol_errors.inc()

    def observe_authentication_refused(self, credential: str) -> None:
        """A client's request or a worker's connection was refused."""
        self._authentications_refused.labels(credential=credential).inc()

    def set_requests(self, *, num_pending: int, num_retries: int) -> None:
        """Requests pending now, and the retries since the gateway started."""
        self._pending.set(num_pending)
        self._retries.set(num_retries)

    def set_leaked(self, num_leaked: Mapping[str, int]) -> None:
        """By kind, as of the last audit."""
        for kind, count in num_leaked.items():
            self._leaked.labels(kind=kind).set(count)

    def exposition(self) -> bytes:
        """Prometheus text format."""
        return generate_latest(self.registry)

    def _counter(self, name: str, documentation: str, *labels: str) -> Counter:
        return Counter(name, documentation, labels, registry=self.registry)

    def _model_counter(self, name: str, documentation: str) -> Counter:
        return self._counter(name, documentation, "model_name").labels(model_name=self._model_name)
