"""What the gateway notes of one request while it is answered: instants, tokens, and how it ended."""

from enum import Enum

from pdserve.clock import Clock
from pdserve.gateway.failures import Failure
from pdserve.telemetry.gateway_metrics import GatewayMetrics
from pdserve.telemetry.instants import Instant, RequestInstants
from pdserve.wire.cluster import Delta, FinishReason


class Outcome(Enum):
    PENDING = "pending"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


class RequestRecord:
    """Lifetime: one request. The first of `finished`, `failed` and `cancelled` ends it."""

    def __init__(self, metrics: GatewayMetrics, clock: Clock) -> None:
        self._metrics = metrics
        self._clock = clock
        self._instants = RequestInstants()
        self._last_delta_ns: int | None = None
        self.num_prompt_tokens = 0
        self.num_tokens = 0
        self.outcome = Outcome.PENDING
        self.at(Instant.RECEIVED)

    def at(self, instant: Instant) -> None:
        self._instants = self._instants.at(instant, self._clock.now_ns())

    def delivered(self, delta: Delta) -> None:
        """A delta reached the client (streaming) or the answer (not)."""
        now_ns = self._clock.now_ns()
        if delta.prefill is not None:
            self._metrics.observe_prefill(delta.prefill.value)
        if not delta.token_ids:
            return
        gap_ns = None if self._last_delta_ns is None else now_ns - self._last_delta_ns
        if gap_ns is None:
            self._instants = self._instants.at(Instant.FIRST_TOKEN, now_ns)
        self._metrics.observe_tokens(len(delta.token_ids), gap_ns=gap_ns)
        self._last_delta_ns = now_ns
        self.num_tokens += len(delta.token_ids)

    def restarted(self) -> None:
        """The tokens so far were of a worker that was lost; the answer begins again."""
        self._last_delta_ns = None
        self.num_tokens = 0

    def tokenized(self, num_prompt_tokens: int) -> None:
        self.num_prompt_tokens = num_prompt_tokens
        self.at(Instant.TOKENIZED)

    def finished(self, finish_reason: FinishReason) -> None:
        self.outcome = Outcome.FINISHED
        if self._last_delta_ns is not None:
            self._instants = self._instants.at(Instant.LAST_TOKEN, self._last_delta_ns)
        self.at(Instant.FINISHED)
        self._metrics.observe_finished(
            self._instants,
            finish_reason=finish_reason.value,
            num_prompt_tokens=self.num_prompt_tokens,
            num_tokens=self.num_tokens,
        )

    def failed(self, failure: Failure) -> None:
        if self.outcome is Outcome.PENDING:
            self.outcome = Outcome.FAILED
            self._metrics.observe_failed(failure.code)

    def cancelled(self) -> None:
        if self.outcome is Outcome.PENDING:
            self.outcome = Outcome.CANCELLED
            self._metrics.observe_cancelled()
