"""The decode role of one data parallel rank: every request from `Generate` to its one ending (rule H7). Sans-IO."""

from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from types import MappingProxyType

from pdserve.decode.choice import Choice, ChoicePhase
from pdserve.decode.deltas import split_deltas
from pdserve.decode.limits import DecodeLimits, why_impossible
from pdserve.decode.prefill_place import next_place, reason_from_the_start
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
from pdserve.transfer.outcome import HandoffFailed, HandoffLanded
from pdserve.transfer.receiver import Receiver
from pdserve.units import div_ceil, ns_to_seconds
from pdserve.wire.cluster import MAX_GENERATED_ENTRIES, Delta, Failed, FailureKind, Generate, Generated
from pdserve.wire.peer import Message


class DecodeRole:
    """Threads: one. Messages for the gateway are taken with `take_messages`, ended requests with `take_ended`.

    Ownership of a request's pages: nobody's while PENDING, the receiver's in HANDOFF, the scheduler's while SCHEDULED.

    A prompt is computed once, as that of the lead, the first choice; the others are forked from its pages when these
    hold the prompt: at the landing, or else with the first token. Of a prompt of one token there is nothing to wait
    for. Choices that resume from tokens of their own are prefilled each by itself, unless there is but one.
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
        keeps_tails: bool = False,
        on_prefilled: Callable[[Request, tuple[PageIndex, ...]], None] | None = None,
    ) -> None:
        """`receiver` is the worker's; `scheduler` and `pool` are of data parallel rank `dp_rank`.

        `needs_prefill_worker`: prompts are prefilled here for want of one alone, unless they have one token.

        `keeps_tails`: the engine's drafter begins with the hidden state that was handed over.

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
        self._keeps_tails = keeps_tails
        self._on_prefilled = on_prefilled
        self._requests: OrderedDict[RequestId, Request] = OrderedDict()
        self._by_sequence: dict[SequenceId, tuple[Request, Choice]] = {}
        """Of all choices that wait, or whose sequence the scheduler has."""
        self._pending: deque[Request] = deque()
        self._deltas: list[Delta] = []
        self._failures: list[Failed] = []
        self._ended: list[Request] = []

    @property
    def num_open(self) -> int:
        return len(self._requests)

    @property
    def num_pending(self) -> int:
        """Sequences of the requests that wait for room."""
        return sum(len(request.waiting_choices) for request in self._pending)

    @property
    def num_pending_tokens(self) -> int:
        return sum(request.num_waiting_tokens for request in self._pending)

    @property
    def owners(self) -> Mapping[SequenceId, tuple[Request, Choice]]:
        """Of all choices that wait, or whose sequence the scheduler has; their requests may have ended."""
        return MappingProxyType(self._by_sequence)

    def on_generate(self, generate: Generate, *, now_ns: int) -> None:
        limits = self._limits
        num_open_choices = generate.num_choices - sum(choice.is_finished for choice in generate.told)
        problem = why_impossible(generate, limits, num_kv_tokens=self._pool.num_pages * self._page_slots)
        if problem is not None:
            self._refuse(generate, FailureKind.INVALID, problem)
        elif generate.request_id in self._requests:
            return  # The gateway repeated itself; the request that runs under this id will answer.
        elif len(self._requests) >= limits.max_requests:
            self._refuse(generate, FailureKind.CAPACITY, f"{limits.max_requests} requests are open on this worker")
        elif len(self._by_sequence) + num_open_choices > limits.max_sequences:
            message = f"{num_open_choices} more answers are over the {limits.max_sequences} of this worker"
            self._refuse(generate, FailureKind.CAPACITY, message)
        else:
            self._take_on(generate, now_ns=now_ns)

    def on_abort(self, request_id: RequestId, *, now_ns: int) -> None:
        request = self._requests.get(request_id)
        if request is not None:
            self._let_go(request, now_ns=now_ns)

    def request_of(self, sequence_id: SequenceId) -> Request | None:
        """The request that a sequence in a batch belongs to, if it is one of ours."""
        owner = self._by_sequence.get(sequence_id)
        return owner[0] if owner is not None else None

    def before_pass(self, batch: Batch, *, now_ns: int) -> None:
        """Note when a request first runs."""
        for chunk in batch.chunks:
            owner = self._by_sequence.get(chunk.sequence_id)
            if owner is not None and chunk.samples and not owner[1].has_sampled:
                owner[0].mark(Instant.SCHEDULED, now_ns)

    def after_pass(self, outcome: StepOutcome, *, now_ns: int) -> None:
        for sequence in outcome.removed:
            owner = self._by_sequence.pop(sequence.sequence_id, None)
            if owner is not None:
                self._pool.release(sequence.page_indices)
                self._release_unread_tail(owner[0])
        for prompt in outcome.prompt_logprobs:
            request = self.request_of(prompt.sequence.sequence_id)
            if request is not None:
                self._deltas += request.tell_prompt(prompt.start, prompt.entries)
        for sequence, token_ids in outcome.sampled:
            owner = self._by_sequence.get(sequence.sequence_id)
            if owner is not None:
                logprobs = outcome.logprobs.get(sequence.sequence_id)
                self._accept(*owner, sequence, token_ids, logprobs, now_ns=now_ns)
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

    def _take_on(self, generate: Generate, *, now_ns: int) -> None:
        request = Request(generate, new_sequence_id=self._new_sequence_id, tokenizer=self._tokenizer, now_ns=now_ns)
        request.local_reason = reason_from_the_start(request, needs_prefill_worker=self._needs_prefill_worker)
        self._requests[request.request_id] = request
        for choice in request.waiting_choices:
            self._by_sequence[choice.sequence_id] = request, choice
        self._pending.append(request)
        self.advance(now_ns=now_ns)

    def _start(self, request: Request, *, now_ns: int) -> bool:
        """Send a request on its way; false when it must wait for room."""
        if request.local_reason is None:
            place = next_place(request, self._receiver, dp_rank=self._dp_rank)
            if not isinstance(place, LocalReason):
                return self._open_handoff(request, place, now_ns=now_ns)
            request.local_reason = place
        for choice in request.waiting_choices if request.resumes_apart else [request.lead]:
            try:
                self._scheduler.add(self._sequence(request, choice))
            except CapacityError:
                return False
            choice.phase = ChoicePhase.SCHEDULED
        request.phase = Phase.SCHEDULED
        if request.num_prompt_tokens == 1:
            self._fork_waiting(request, [])
        return True

    def _open_handoff(self, request: Request, peer: Incarnation, *, now_ns: int) -> bool:
        token_ids = request.token_ids_of(request.lead)
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
        request.asked_peers.append(peer)
        request.handoff_failure = None
        request.mark(Instant.GRANTED, now_ns)
        return True

    def _handoff_timeout_s(self, request: Request, now_ns: int) -> float:
        return min(ns_to_seconds(max(request.deadline_ns - now_ns, 0)), self._limits.handoff_timeout_s)

    def _sequence(self, request: Request, choice: Choice, *, num_computed: int = 0) -> Sequence:
        """Without pages. Only one whose prompt is computed can begin with the tail."""
        return Sequence(
            sequence_id=choice.sequence_id,
            token_ids=list(request.token_ids_of(choice)),
            num_prompt_tokens=request.num_prompt_tokens,
            arrival_ns=request.arrival_ns,
            sampling=choice.sampling,
            num_computed=num_computed,
            carry_slot=request.tail_slot if num_computed > 0 else None,
        )

    def _fork_waiting(self, request: Request, page_indices: list[PageIndex]) -> None:
        """Start the other choices from pages that hold the prompt but for its last token."""
        num_computed = request.num_prompt_tokens - 1
        shared = page_indices[: div_ceil(num_computed, self._page_slots)]
        for choice in request.waiting_choices:
            self._scheduler.fork(self._sequence(request, choice, num_computed=num_computed), page_indices=shared)
            choice.phase = ChoicePhase.SCHEDULED

    # Handoffs

    def _landed(self, outcome: HandoffLanded, *, now_ns: int) -> None:
        request = self._requests.get(outcome.request_id)
        is_wanted = request is not None and request.handoff_id == outcome.handoff_id
        if not self._keeps_tails or not is_wanted:
            self._receiver.release_tail_slot(self._dp_rank, outcome.tail_slot)
        if request is None or not is_wanted:
            self._pool.release(outcome.page_indices)
            return
        request.mark(Instant.LANDED, outcome.landed.last_ns)
        request.arrivals_ns = outcome.landed.arrivals_ns
        request.tail_slot = outcome.tail_slot if self._keeps_tails else None
        if self._on_prefilled is not None:
            self._on_prefilled(request, tuple(outcome.page_indices))
        lead = request.lead
        sequence = self._sequence(request, lead, num_computed=len(request.token_ids_of(lead)) - 1)
        sequence.page_indices = outcome.page_indices
        self._scheduler.add(sequence)
        lead.phase = ChoicePhase.SCHEDULED
        self._fork_waiting(request, outcome.page_indices)
        request.phase = Phase.SCHEDULED

    def _handoff_failed(self, outcome: HandoffFailed) -> None:
        """Another prefill worker is asked, or it is prefilled here; the lost handoff's pages stay with the receiver."""
        request = self._requests.get(outcome.request_id)
        if request is None or request.handoff_id != outcome.handoff_id:
            return
        is_refusal = isinstance(outcome.error, CapacityError)
        request.handoff_failure = LocalReason.REFUSED if is_refusal else LocalReason.HANDOFF_FAILED
        request.handoff_id = None
        request.phase = Phase.PENDING
        self._pending.appendleft(request)

    # Running and ending

    def _accept(
        self,
        request: Request,
        choice: Choice,
        sequence: Sequence,
        token_ids: tuple[int, ...],
        logprobs: tuple[TokenLogprobs, ...] | None,
        *,
        now_ns: int,
    ) -> None:
        if not choice.has_sampled:
            request.mark(Instant.FIRST_TOKEN, now_ns)
            if choice is request.lead and request.local_reason is not None:
                self._prefilled_here(request, sequence.page_indices)
        delta = request.tell(choice, token_ids, logprobs)
        if delta is None:
            return
        self._deltas.append(delta)
        if delta.finish_reason is not None:
            self._give_back(choice)
            if request.is_answered:
                self._let_go(request, now_ns=now_ns)

    def _prefilled_here(self, request: Request, page_indices: list[PageIndex]) -> None:
        """The lead has its first token: its pages hold the prompt."""
        if self._on_prefilled is not None:
            self._on_prefilled(request, tuple(page_indices))
        if not request.resumes_apart:
            self._fork_waiting(request, page_indices)

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
        """End a request: whatever it holds is given back now, or by who may still write to it or read it."""
        match request.phase:
            case Phase.PENDING:
                self._pending.remove(request)
            case Phase.HANDOFF:
                if request.handoff_id is not None:
                    self._receiver.cancel(request.handoff_id, now_ns=now_ns)
            case Phase.SCHEDULED:
                pass
            case Phase.ENDED:
                return
        request.phase = Phase.ENDED
        request.mark(Instant.FINISHED, now_ns)
        for choice in request.choices:
            self._give_back(choice)
        self._release_unread_tail(request)
        del self._requests[request.request_id]
        self._ended.append(request)

    def _give_back(self, choice: Choice) -> None:
        """A choice has ended: its pages go back now, or after the pass that is computing it."""
        phase, choice.phase = choice.phase, ChoicePhase.DONE
        if phase is ChoicePhase.SCHEDULED:
            sequence = self._scheduler.remove(choice.sequence_id)
            if sequence is None:
                return
            self._pool.release(sequence.page_indices)
        if phase is not ChoicePhase.DONE:
            del self._by_sequence[choice.sequence_id]

    def _release_unread_tail(self, request: Request) -> None:
        """Of a request that ended: the tail slot goes back when no pass can read it any more."""
        is_read = any(choice.sequence_id in self._by_sequence for choice in request.choices)
        if request.tail_slot is not None and request.phase is Phase.ENDED and not is_read:
            self._receiver.release_tail_slot(self._dp_rank, request.tail_slot)
            request.tail_slot = None
