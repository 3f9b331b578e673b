"""What the gateway notes of one request while it is answered: instants, tokens, and how it ended."""

from dataclasses import dataclass
from enum import Enum

from pdserve.clock import Clock
from pdserve.gateway.failures import Failure
from pdserve.telemetry.gateway_metrics import GatewayMetrics
from pdserve.telemetry.instants import Instant, RequestInstants
from pdserve.units import ns_to_seconds
from pdserve.wire.cluster import Delta, FinishReason


class Outcome(Enum):
    PENDING = "pending"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


class RequestPhase(Enum):
    READING = "reading"
    """Its body is read, checked and tokenized."""
    DISPATCHING = "dispatching"
    WAITING = "waiting"
    """Workers have it; the client has nothing yet."""
    ANSWERING = "answering"
    ENDED = "ended"
    """The last bytes are on their way."""


@dataclass(slots=True)
class _Choice:
    first_delta_ns: int | None = None
    last_delta_ns: int | None = None
    """First and last delta with tokens."""
    num_tokens: int = 0
    finish_reason: FinishReason | None = None


class RequestRecord:
    """Lifetime: one request. The first of `finished`, `failed` and `cancelled` ends it."""

    def __init__(self, metrics: GatewayMetrics, clock: Clock) -> None:
        self._metrics = metrics
        self._clock = clock
        self._instants = RequestInstants()
        self._choices: dict[tuple[int, int], _Choice] = {}
        """By prompt, and choice of the answer to it."""
        self.num_prompt_tokens = 0
        self.outcome = Outcome.PENDING
        self.at(Instant.RECEIVED)

    @property
    def num_tokens(self) -> int:
        return sum(choice.num_tokens for choice in self._choices.values())

    @property
    def received_ns(self) -> int:
        return self._instants.times_ns[Instant.RECEIVED]

    @property
    def phase(self) -> RequestPhase:
        if self.outcome is not Outcome.PENDING:
            return RequestPhase.ENDED
        if self._choices:
            return RequestPhase.ANSWERING
        if Instant.DISPATCHED in self._instants.times_ns:
            return RequestPhase.WAITING
        is_read = Instant.TOKENIZED in self._instants.times_ns
        return RequestPhase.DISPATCHING if is_read else RequestPhase.READING

    def at(self, instant: Instant) -> None:
        self._instants = self._instants.at(instant, self._clock.now_ns())

    def delivered(self, prompt_index: int, delta: Delta) -> None:
        """A delta reached the client (streaming) or the answer (not)."""
        if delta.prefill is not None:
            self._metrics.observe_prefill(delta.prefill.value)
        choice = self._choices.setdefault((prompt_index, delta.choice_index), _Choice())
        choice.finish_reason = delta.finish_reason
        if not delta.token_ids:
            return
        now_ns = self._clock.now_ns()
        gap_ns = None if choice.last_delta_ns is None else now_ns - choice.last_delta_ns
        self._metrics.observe_tokens(len(delta.token_ids), gap_ns=gap_ns)
        if choice.first_delta_ns is None:
            choice.first_delta_ns = now_ns
        choice.last_delta_ns = now_ns
        choice.num_tokens += len(delta.token_ids)

    def tokenized(self, num_prompt_tokens: int) -> None:
        self.num_prompt_tokens = num_prompt_tokens
        self.at(Instant.TOKENIZED)

    def finished(self) -> None:
        """Every choice has its finish reason."""
        self.outcome = Outcome.FINISHED
        choices = self._choices.values()
        first_ns = [choice.first_delta_ns for choice in choices if choice.first_delta_ns is not None]
        last_ns = [choice.last_delta_ns for choice in choices if choice.last_delta_ns is not None]
        if first_ns and last_ns:
            self._instants = self._instants.at(Instant.FIRST_TOKEN, min(first_ns))
            self._instants = self._instants.at(Instant.LAST_TOKEN, max(last_ns))
        self.at(Instant.FINISHED)
        num_gaps = sum(choice.num_tokens - 1 for choice in choices if choice.num_tokens)
        was_cut = any(choice.finish_reason is FinishReason.LENGTH for choice in choices)
        self._metrics.observe_finished(
            self._instants,
            finish_reason=(FinishReason.LENGTH if was_cut else FinishReason.STOP).value,
            num_prompt_tokens=self.num_prompt_tokens,
            num_generated_tokens=self.num_tokens,
            mean_gap_s=ns_to_seconds(sum(last_ns) - sum(first_ns)) / num_gaps if num_gaps else None,
        )

    def failed(self, failure: Failure) -> None:
        if self.outcome is Outcome.PENDING:
            self.outcome = Outcome.FAILED
            self._metrics.observe_failed(failure.code)

    def cancelled(self) -> None:
        if self.outcome is Outcome.PENDING:
            self.outcome = Outcome.CANCELLED
            self._metrics.observe_cancelled()
