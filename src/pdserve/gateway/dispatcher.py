"""Which rank of which worker has which request, and what happens when one is lost: decided here, sans-IO.

Invariants (the state machine test checks them):
1. A request ends exactly once: by the finish reason of its last choice, by `Fail`, or by `cancel` (rule H7).
2. An attempt belongs to one incarnation of one worker; what anybody else says of it is refused and counted (rule H4),
   as is what is said of a choice that has finished, or that nobody asked for. A choice of more tokens than were asked
   for fails its request.
3. What is delivered of a request, by whichever workers, is one answer: nothing twice, nothing left out (rule H8). A
   request that moves to another worker says what was delivered, and is continued from there.
4. A request is sent to at most `1 + MAX_RETRIES` workers.
"""

from collections.abc import Iterable, Set
from dataclasses import dataclass, field
from typing import Protocol, assert_never

from pdserve.cluster.registry import Registry
from pdserve.cluster.view import WorkerView
from pdserve.errors import CapacityError
from pdserve.gateway.errors import failure_of_worker
from pdserve.gateway.failures import (
    SHUTTING_DOWN,
    TIMED_OUT,
    Failure,
    RequestFailed,
    broke_protocol,
    no_worker,
    too_many_pending,
    worker_lost,
)
from pdserve.gateway.progress import Progress
from pdserve.ids import Incarnation, RequestId, WorkerId
from pdserve.routing.least_loaded import LeastLoaded, Route
from pdserve.routing.order import RankKey
from pdserve.sampling import SamplingParams
from pdserve.units import ns_to_seconds
from pdserve.wire.cluster import (
    MAX_TOLD_TOKENS,
    Abort,
    Delta,
    Failed,
    FailureKind,
    Generate,
    Generated,
    PrefillTarget,
    Told,
    resumes_apart,
)

MAX_RETRIES = 2
"""A request that three ranks could not answer may be what breaks them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One request as it is dispatched."""

    request_id: RequestId
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    deadline_ns: int
    num_choices: int = 1
    """Answers wanted, at most `MAX_CHOICES`."""
    traced: bool = False


@dataclass(frozen=True, slots=True)
class Send:
    """Give the message to the connection of this worker."""

    worker_id: WorkerId
    message: Generate | Abort


@dataclass(frozen=True, slots=True)
class Deliver:
    request_id: RequestId
    delta: Delta


@dataclass(frozen=True, slots=True)
class Fail:
    request_id: RequestId
    failure: Failure


Action = Send | Deliver | Fail


class PendingWork(Protocol):
    """A request that has not ended, as others read it."""

    @property
    def work(self) -> Work: ...
    @property
    def attempt_id(self) -> RequestId: ...
    @property
    def worker_id(self) -> WorkerId: ...
    @property
    def dp_rank(self) -> int: ...


@dataclass(slots=True)
class _Pending:
    work: Work
    attempt_id: RequestId
    worker_id: WorkerId
    incarnation: Incarnation
    dp_rank: int
    progress: Progress
    num_retries: int = 0
    excluded_workers: set[WorkerId] = field(default_factory=set[WorkerId])
    """They said that they shut down. One that was lost is not in the view, and its successor may take the request."""
    excluded_ranks: set[RankKey] = field(default_factory=set[RankKey])
    """They were full."""


class Dispatcher:
    """The table of pending requests. Every method returns the actions that follow, in order."""

    def __init__(self, registry: Registry, *, max_pending: int) -> None:
        self._registry = registry
        self._balance = LeastLoaded()
        self._max_pending = max_pending
        self._by_request: dict[RequestId, _Pending] = {}
        self._by_attempt: dict[RequestId, _Pending] = {}
        self.num_stale = 0
        """Deltas and failures that belonged to no pending attempt of their sender, or to no open choice of it."""
        self.num_retries = 0

    @property
    def num_pending(self) -> int:
        return len(self._by_request)

    @property
    def pending(self) -> tuple[PendingWork, ...]:
        return tuple(self._by_request.values())

    def submit(self, work: Work, now_ns: int) -> list[Action]:
        """Raises: `RequestFailed` when the table is full or no worker can take it; nothing is pending then."""
        if len(self._by_request) >= self._max_pending:
            raise RequestFailed(too_many_pending(self._max_pending))
        try:
            route = self._choose(num_prompt_tokens=len(work.prompt_token_ids))
        except CapacityError as error:
            raise RequestFailed(no_worker(self._registry.view)) from error
        pending = _Pending(
            work,
            work.request_id,
            route.decode.worker_id,
            route.decode.incarnation,
            route.dp_rank,
            Progress(num_choices=work.num_choices),
        )
        self._by_request[work.request_id] = pending
        self._by_attempt[pending.attempt_id] = pending
        return [self._send(pending, route, (), now_ns)]

    def generated(self, worker_id: WorkerId, generated: Generated) -> list[Action]:
        actions: list[Action] = []
        for delta in generated.deltas:
            pending = self._owned(delta.request_id, worker_id, generated.sender)
            if pending is None:
                continue
            work, progress = pending.work, pending.progress
            if not progress.accepts(delta):
                self.num_stale += 1
                continue
            num_tokens, max_tokens = progress.num_tokens_with(delta), work.sampling.max_tokens
            if num_tokens > max_tokens:
                wrong = broke_protocol(worker_id, f"sent {num_tokens} tokens where {max_tokens} were asked for")
                actions += self._abandon([pending], wrong)
                continue
            progress.add(delta)
            actions.append(Deliver(work.request_id, delta))
            if progress.is_finished:
                self._end(pending)
        return actions

    def failed(self, worker_id: WorkerId, failed: Failed, now_ns: int) -> list[Action]:
        """A worker gave a request up. A rank that is full or a worker that shuts down is a reason to ask another."""
        pending = self._owned(failed.request_id, worker_id, failed.sender)
        if pending is None:
            return []
        failure = failure_of_worker(failed)
        match failed.kind:
            case FailureKind.CAPACITY:
                pending.excluded_ranks.add((worker_id, pending.dp_rank))
                return self._retry(pending, failure, now_ns)
            case FailureKind.SHUTTING_DOWN:
                pending.excluded_workers.add(worker_id)
                return self._retry(pending, failure, now_ns)
            case FailureKind.TIMEOUT | FailureKind.INVALID | FailureKind.INTERNAL:
                return self._fail(pending, failure)
            case _:
                assert_never(failed.kind)

    def worker_left(self, worker: WorkerView, now_ns: int) -> list[Action]:
        """Everything that this incarnation had is sent to another (which may be its successor), or fails (rule H10)."""
        failure = worker_lost(worker.worker_id)
        lost = [
            pending
            for pending in self._by_request.values()
            if (pending.worker_id, pending.incarnation) == (worker.worker_id, worker.incarnation)
        ]
        return [action for pending in lost for action in self._retry(pending, failure, now_ns)]

    def cancel(self, request_id: RequestId) -> list[Action]:
        """The client is gone; nothing when the request has ended."""
        pending = self._by_request.get(request_id)
        if pending is None:
            return []
        self._end(pending)
        return [_abort(pending)]

    def expire(self, now_ns: int) -> list[Action]:
        """End the requests whose deadline has passed."""
        overdue = [pending for pending in self._by_request.values() if pending.work.deadline_ns <= now_ns]
        return self._abandon(overdue, TIMED_OUT)

    def shut_down(self) -> list[Action]:
        """End all requests."""
        return self._abandon(list(self._by_request.values()), SHUTTING_DOWN)

    def _abandon(self, requests: Iterable[_Pending], failure: Failure) -> list[Action]:
        return [action for pending in requests for action in (_abort(pending), *self._fail(pending, failure))]

    def _owned(self, attempt_id: RequestId, worker_id: WorkerId, sender: Incarnation) -> _Pending | None:
        pending = self._by_attempt.get(attempt_id)
        if pending is None or pending.worker_id != worker_id or pending.incarnation != sender:
            self.num_stale += 1
            return None
        return pending

    def _retry(self, pending: _Pending, failure: Failure, now_ns: int) -> list[Action]:
        """Let another rank go on with what is not delivered yet."""
        if pending.num_retries >= MAX_RETRIES or pending.progress.num_tokens > MAX_TOLD_TOKENS:
            return self._fail(pending, failure)
        told = pending.progress.told()
        try:
            route = self._choose(
                num_prompt_tokens=_num_tokens_to_prefill(pending, told),
                excluded_workers=pending.excluded_workers,
                excluded_ranks=pending.excluded_ranks,
            )
        except CapacityError:
            return self._fail(pending, failure)
        del self._by_attempt[pending.attempt_id]
        pending.num_retries += 1
        self.num_retries += 1
        pending.attempt_id = RequestId(f"{pending.work.request_id}.{pending.num_retries}")
        pending.worker_id, pending.incarnation = route.decode.worker_id, route.decode.incarnation
        pending.dp_rank = route.dp_rank
        self._by_attempt[pending.attempt_id] = pending
        return [self._send(pending, route, told, now_ns)]

    def _choose(
        self,
        *,
        num_prompt_tokens: int,
        excluded_workers: Set[WorkerId] = frozenset(),
        excluded_ranks: Set[RankKey] = frozenset(),
    ) -> Route:
        """Among the workers as they are now. Raises: `CapacityError`."""
        self._balance.update(self._registry.take_changed())
        return self._balance.choose(
            num_prompt_tokens=num_prompt_tokens, excluded_workers=excluded_workers, excluded_ranks=excluded_ranks
        )

    def _send(self, pending: _Pending, route: Route, told: tuple[Told, ...], now_ns: int) -> Send:
        work, decode = pending.work, route.decode
        # Logprobs of a prompt are computed with it, and only a decode worker has somebody to tell them to.
        is_local = work.sampling.num_prompt_logprobs is not None or resumes_apart(told)
        prefill = None if is_local else route.prefill
        num_tokens = _num_tokens_to_prefill(pending, told)
        self._registry.dispatched(
            decode.worker_id,
            dp_rank=route.dp_rank,
            num_sequences=pending.progress.num_unfinished,
            num_tokens=0 if prefill else num_tokens,
        )
        if prefill is not None:
            self._registry.dispatched(prefill.worker_id, dp_rank=0, num_sequences=1, num_tokens=num_tokens)
        generate = Generate(
            request_id=pending.attempt_id,
            receiver=decode.incarnation,
            dp_rank=route.dp_rank,
            prompt_token_ids=work.prompt_token_ids,
            sampling=work.sampling,
            num_choices=work.num_choices,
            told=told,
            num_prompt_logprobs_told=pending.progress.num_prompt_logprobs,
            prefill=prefill_target(prefill) if prefill else None,
            timeout_s=max(0.0, ns_to_seconds(work.deadline_ns - now_ns)),
            traced=work.traced,
        )
        return Send(decode.worker_id, generate)

    def _fail(self, pending: _Pending, failure: Failure) -> list[Action]:
        self._end(pending)
        return [Fail(pending.work.request_id, failure)]

    def _end(self, pending: _Pending) -> None:
        del self._by_request[pending.work.request_id]
        del self._by_attempt[pending.attempt_id]


def _num_tokens_to_prefill(pending: _Pending, told: tuple[Told, ...]) -> int:
    num_prompts = pending.progress.num_unfinished if resumes_apart(told) else 1
    return num_prompts * len(pending.work.prompt_token_ids) + pending.progress.num_tokens


def prefill_target(worker: WorkerView) -> PrefillTarget:
    return PrefillTarget(worker_id=worker.worker_id, incarnation=worker.incarnation, url=worker.url)


def _abort(pending: _Pending) -> Send:
    return Send(pending.worker_id, Abort(request_id=pending.attempt_id, receiver=pending.incarnation))
