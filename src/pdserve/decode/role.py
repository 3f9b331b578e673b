"""The decode role of one data parallel rank: every request from `Generate` to its one ending (rule H7). Sans-IO."""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from pdserve.decode.request import LocalReason, Phase, Request
from pdserve.errors import CapacityError
from pdserve.ids import Incarnation, PageIndex, RequestId, SequenceId
from pdserve.kv.pages import PagePool
from pdserve.sampling import TokenLogprobs
from pdserve.schedule.batch import Batch
from pdserve.schedule.outcome import StepOutcome
from pdserve.schedule.scheduler import Scheduler
from pdserve.schedule.sequence import Sequence
from pdserve.telemetry.instants import Instant
from pdserve.text.tokenizer import Tokenizer
from pdserve.transfer.receiver import HandoffFailed, HandoffLanded, Receiver
from pdserve.units import div_ceil, ns_to_seconds
from pdserve.wire.cluster import MAX_GENERATED_ENTRIES, Delta, Failed, FailureKind, Generate, Generated
from pdserve.wire.peer import Message


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeLimits:
    max_requests: int = 512
    """Requests in any phase; one more is refused with 429."""
    max_model_len: int
    retry_after_s: float = 1.0
    handoff_timeout_s: float = 120.0
    """A handoff that has not landed by then is cancelled, and its prompt prefilled here: a prefill worker that is alive
    but stuck must not use up the whole time of a request."""


def split_deltas(deltas: Iterable[Delta], *, max_entries: int) -> list[tuple[Delta, ...]]:
    """In order, in as few parts as there can be that have at most so many entries, or one delta alone."""
    parts: list[list[Delta]] = []
    num_entries = 0
    for delta in deltas:
        num_entries += len(delta.entries)
        if not parts or num_entries > max_entries:
            parts.append([])
            num_entries = len(delta.entries)
        parts[-1].append(delta)
    return [tuple(part) for part in parts]


class DecodeRole:
    """Threads: one. Messages for the gateway are taken with `take_messages`, ended requests with `take_ended`.

    Ownership of a request's pages: nobody's while PENDING, the receiver's in HANDOFF, the scheduler's while SCHEDULED.
    """

    def __init__(
        self,
        *,
        incarnation: Incarnation,
        dp_rank: int = 0,
        receiver: Receiver,
        scheduler: Scheduler,
        pool: PagePool,
        page_slots: int,
        tokenizer: Tokenizer,
        new_sequence_id: Callable[[], SequenceId],
        limits: DecodeLimits,
        needs_prefill_worker: bool = False,
        on_prefilled: Callable[[Request, tuple[PageIndex, ...]], None] | None = None,
    ) -> None:
        """`receiver` is the worker's; `scheduler` and `pool` are of data parallel rank `dp_rank`.

        `needs_prefill_worker`: prompts are prefilled here for want of one alone, unless they have one token.

        `on_prefilled(request, page_indices)` sees the pages of a prompt when they are whole: for verification.
        """
        self._incarnation = incarnation
        self._dp_rank = dp_rank
        self._receiver = receiver
        self._scheduler = scheduler
        self._pool = pool
        self._page_slots = page_slots
        self._tokenizer = tokenizer
        self._new_sequence_id = new_sequence_id
        self._limits = limits
        self._needs_prefill_worker = needs_prefill_worker
        self._on_prefilled = on_prefilled
        self._requests: OrderedDict[RequestId, Request] = OrderedDict()
        self._by_sequence: dict[SequenceId, Request] = {}
        self._pending: deque[Request] = deque()
        self._deltas: list[Delta] = []
        self._failures: list[Failed] = []
        self._ended: list[Request] = []

    @property
    def num_open(self) -> int:
        return len(self._requests)

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    @property
    def num_pending_tokens(self) -> int:
        return sum(len(request.generate.prompt_token_ids) for request in self._pending)

    def on_generate(self, generate: Generate, *, now_ns: int) -> None:
        problem = self._impossible(generate)
        if problem is not None:
            self._refuse(generate, FailureKind.INVALID, problem)
        elif generate.request_id in self._requests:
            return  # The gateway repeated itself; the request that runs under this id will answer.
        elif len(self._requests) >= self._limits.max_requests:
            message = f"{self._limits.max_requests} requests are open on this worker"
            self._refuse(generate, FailureKind.CAPACITY, message)
        else:
            request = Request(generate, sequence_id=self._new_sequence_id(), tokenizer=self._tokenizer, now_ns=now_ns)
            if self._needs_prefill_worker and generate.prefill is None and len(generate.prompt_token_ids) > 1:
                request.local_reason = LocalReason.NO_PREFILL_WORKER
            self._requests[request.request_id] = request
            self._by_sequence[request.sequence_id] = request
            self._pending.append(request)
            self.advance(now_ns=now_ns)

    def on_abort(self, request_id: RequestId, *, now_ns: int) -> None:
        request = self._requests.get(request_id)
        if request is not None:
            self._let_go(request, now_ns=now_ns)

    def request_of(self, sequence_id: SequenceId) -> Request | None:
        """The request that a sequence in a batch belongs to, if it is one of ours."""
        return self._by_sequence.get(sequence_id)

    def before_pass(self, batch: Batch, *, now_ns: int) -> None:
        """Note when a request first runs."""
        for chunk in batch.chunks:
            request = self._by_sequence.get(chunk.sequence_id)
            if request is not None and chunk.samples:
                request.mark(Instant.SCHEDULED, now_ns)

    def after_pass(self, outcome: StepOutcome, *, now_ns: int) -> None:
        for sequence in outcome.removed:
            if self._by_sequence.pop(sequence.sequence_id, None) is not None:
                self._pool.release(sequence.page_indices)
        for sequence, token_id in outcome.sampled:
            request = self._by_sequence.get(sequence.sequence_id)
            if request is not None:
                logprobs = outcome.logprobs.get(sequence.sequence_id)
                self._accept(request, sequence, token_id, logprobs, now_ns=now_ns)
        self.advance(now_ns=now_ns)

    def advance(self, *, now_ns: int) -> None:
        """Apply what the receiver has to say, then start what waits for pages. Call after each event."""
        for outcome in self._receiver.take_outcomes(self._dp_rank):
            match outcome:
                case HandoffLanded():
                    self._landed(outcome, now_ns=now_ns)
                case HandoffFailed():
                    self._handoff_failed(outcome)
        while self._pending and self._start(self._pending[0], now_ns=now_ns):
            self._pending.popleft()

    def on_time(self, now_ns: int) -> None:
        """End requests whose deadline has passed."""
        for request in [request for request in self._requests.values() if now_ns >= request.deadline_ns]:
            elapsed_s = ns_to_seconds(now_ns - request.arrival_ns)
            self._fail(request, FailureKind.TIMEOUT, f"no full answer within {elapsed_s:.1f} s", now_ns=now_ns)
        self.advance(now_ns=now_ns)

    def fail_all(self, kind: FailureKind, message: str, *, now_ns: int) -> None:
        """End every request with the same failure: the worker stops."""
        for request in list(self._requests.values()):
            self._fail(request, kind, message, now_ns=now_ns)

    def abort_all(self, *, now_ns: int) -> None:
        """The gateway that owned every request is gone."""
        for request in list(self._requests.values()):
            self._let_go(request, now_ns=now_ns)

    def take_messages(self) -> list[Message]:
        parts = split_deltas(self._deltas, max_entries=MAX_GENERATED_ENTRIES)
        messages: list[Message] = [Generated(sender=self._incarnation, deltas=part) for part in parts]
        messages.extend(self._failures)
        self._deltas, self._failures = [], []
        return messages

    def take_ended(self) -> list[Request]:
        """Requests that ended, however, since the last call."""
        ended, self._ended = self._ended, []
        return ended

    # Starting

    def _impossible(self, generate: Generate) -> str | None:
        num_tokens = len(generate.prompt_token_ids) + generate.sampling.max_tokens
        if not generate.prompt_token_ids:
            return "the prompt has no tokens"
        if num_tokens > self._limits.max_model_len:
            return f"{num_tokens} tokens (prompt and max_tokens) are over the context of {self._limits.max_model_len}"
        if num_tokens > self._pool.num_pages * self._page_slots:
            return (
                f"{num_tokens} tokens (prompt and max_tokens) do not fit this worker's KV cache of "
                f"{self._pool.num_pages * self._page_slots}; lower max_tokens or raise --kv-tokens"
            )
        return None

    def _start(self, request: Request, *, now_ns: int) -> bool:
        """Send a request on its way; false when it must wait for room."""
        target = request.generate.prefill
        if request.local_reason is None and target is not None:
            if not self._receiver.is_connected(target.incarnation):
                request.local_reason = LocalReason.NO_PREFILL_WORKER
            elif not self._receiver.accepts_handoffs(self._dp_rank):
                request.local_reason = LocalReason.QUARANTINE
            elif len(request.generate.prompt_token_ids) < 2:
                request.local_reason = LocalReason.ROUTED
            else:
                return self._open_handoff(request, target.incarnation, now_ns=now_ns)
        sequence = self._sequence(request, num_computed=0, page_indices=[])
        return self._schedule(request, sequence)

    def _open_handoff(self, request: Request, peer: Incarnation, *, now_ns: int) -> bool:
        token_ids = request.generate.prompt_token_ids
        num_pages = div_ceil(len(token_ids), self._page_slots)
        # Left free: a page for each running sequence to grow, or admission would cause the next preemption; and what
        # waits in the schedule needs, or handoffs could starve local prompts and preempted answers.
        num_reserved = self._scheduler.num_running + div_ceil(self._scheduler.num_waiting_tokens, self._page_slots)
        if self._pool.num_free < num_pages + num_reserved:
            return False
        try:
            request.handoff_id = self._receiver.open(
                request_id=request.request_id,
                token_ids=token_ids,
                peer=peer,
                dp_rank=self._dp_rank,
                now_ns=now_ns,
                timeout_s=self._handoff_timeout_s(request, now_ns),
                traced=request.generate.traced,
            )
        except CapacityError:
            return False
        request.phase = Phase.HANDOFF
        request.mark(Instant.GRANTED, now_ns)
        return True

    def _handoff_timeout_s(self, request: Request, now_ns: int) -> float:
        return min(ns_to_seconds(max(request.deadline_ns - now_ns, 0)), self._limits.handoff_timeout_s)

    def _sequence(self, request: Request, *, num_computed: int, page_indices: list[PageIndex]) -> Sequence:
        token_ids = list(request.generate.prompt_token_ids)
        return Sequence(
            sequence_id=request.sequence_id,
            token_ids=token_ids,
            num_prompt_tokens=len(token_ids),
            arrival_ns=request.arrival_ns,
            sampling=request.sampling,
            num_computed=num_computed,
            page_indices=page_indices,
        )

    def _schedule(self, request: Request, sequence: Sequence) -> bool:
        try:
            self._scheduler.add(sequence)
        except CapacityError:
            return False
        request.phase = Phase.SCHEDULED
        return True

    # Handoffs

    def _landed(self, outcome: HandoffLanded, *, now_ns: int) -> None:
        request = self._requests.get(outcome.request_id)
        if request is None or request.handoff_id != outcome.handoff_id:
            self._pool.release(outcome.page_indices)
            return
        request.mark(Instant.LANDED, outcome.landed.last_ns)
        request.arrivals_ns = outcome.landed.arrivals_ns
        if self._on_prefilled is not None:
            self._on_prefilled(request, tuple(outcome.page_indices))
        num_computed = len(request.generate.prompt_token_ids) - 1
        sequence = self._sequence(request, num_computed=num_computed, page_indices=outcome.page_indices)
        if not self._schedule(request, sequence):
            self._pool.release(outcome.page_indices)
            self._fail(request, FailureKind.CAPACITY, "no room in the schedule for a landed request", now_ns=now_ns)

    def _handoff_failed(self, outcome: HandoffFailed) -> None:
        """Prefill locally instead (DESIGN section 6); the lost handoff's pages stay with the receiver."""
        request = self._requests.get(outcome.request_id)
        if request is None or request.handoff_id != outcome.handoff_id:
            return
        is_refusal = isinstance(outcome.error, CapacityError)
        request.local_reason = LocalReason.REFUSED if is_refusal else LocalReason.HANDOFF_FAILED
        request.handoff_id = None
        request.phase = Phase.PENDING
        self._pending.appendleft(request)

    # Running and ending

    def _accept(
        self, request: Request, sequence: Sequence, token_id: int, logprobs: TokenLogprobs | None, *, now_ns: int
    ) -> None:
        if request.num_generated == 0:
            request.mark(Instant.FIRST_TOKEN, now_ns)
            if request.local_reason is not None and self._on_prefilled is not None:
                self._on_prefilled(request, tuple(sequence.page_indices))
        delta = request.accept(token_id, logprobs)
        self._deltas.append(delta)
        if delta.finish_reason is not None:
            self._let_go(request, now_ns=now_ns)

    def _refuse(self, generate: Generate, kind: FailureKind, message: str) -> None:
        retry_after_s = self._limits.retry_after_s if kind is FailureKind.CAPACITY else None
        self._failures.append(
            Failed(
                sender=self._incarnation,
                request_id=generate.request_id,
                kind=kind,
                message=message,
                retry_after_s=retry_after_s,
            )
        )

    def _fail(self, request: Request, kind: FailureKind, message: str, *, now_ns: int) -> None:
        self._refuse(request.generate, kind, message)
        self._let_go(request, now_ns=now_ns)

    def _let_go(self, request: Request, *, now_ns: int) -> None:
        """End a request: whatever its phase holds is given back now, or by who may still write to it."""
        match request.phase:
            case Phase.PENDING:
                self._pending.remove(request)
                del self._by_sequence[request.sequence_id]
            case Phase.HANDOFF:
                if request.handoff_id is not None:
                    self._receiver.cancel(request.handoff_id, now_ns=now_ns)
                del self._by_sequence[request.sequence_id]
            case Phase.SCHEDULED:
                sequence = self._scheduler.remove(request.sequence_id)
                if sequence is not None:
                    self._pool.release(sequence.page_indices)
                    del self._by_sequence[request.sequence_id]
            case Phase.ENDED:
                return
        request.phase = Phase.ENDED
        request.mark(Instant.FINISHED, now_ns)
        del self._requests[request.request_id]
        self._ended.append(request)
