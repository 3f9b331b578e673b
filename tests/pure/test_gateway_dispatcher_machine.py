"""The dispatcher as a state machine: each request ends exactly once (rule H7), and whatever workers are lost and
whatever they said is lost with them, what the client gets is the answer that one worker would have given (rule H8)."""

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.pure.dispatcher_side import MAX_PENDING, cluster_of, delta_of, failed_of, join_of, work_of
from tests.pure.resumable_answers import Answer, Attempt, Received

from pdserve.cluster.registry import Left, Refused
from pdserve.gateway.dispatcher import MAX_RETRIES, Action, Deliver, Fail, Send
from pdserve.gateway.failures import RequestFailed
from pdserve.ids import Incarnation, RequestId, WorkerId
from pdserve.wire.cluster import Abort, FailureKind, Generate

PROMPT_LOGPROBS = 2
"""Of a prompt of three tokens."""

ANSWERS = st.lists(st.tuples(st.integers(1, 8), st.integers(1, 3)), min_size=1, max_size=3)
"""Tokens and lag of each choice."""


@dataclass
class Client:
    """What the model of one request knows."""

    deadline_ns: int
    answers: list[Answer]
    num_prompt_logprobs: int
    received: list[Received]
    num_ends: int = 0
    num_sends: int = 0
    num_prompt_logprobs_received: int = 0
    attempt: Attempt | None = None
    refused: set[tuple[WorkerId, Incarnation, int]] = field(default_factory=set[tuple[WorkerId, Incarnation, int]])
    """Ranks that were full."""
    shutting_down: set[tuple[WorkerId, Incarnation]] = field(default_factory=set[tuple[WorkerId, Incarnation]])


class DispatcherMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.registry, self.dispatcher = cluster_of("a", "b")
        self.clients: dict[str, Client] = {}
        self.old_attempts: list[Attempt] = []
        self.num_incarnations = 1
        self.now_ns = 0

    def pending(self) -> list[str]:
        return [request_id for request_id, client in self.clients.items() if client.num_ends == 0]

    def running(self) -> list[Attempt]:
        """The attempts of pending requests."""
        attempts = [self.clients[request_id].attempt for request_id in self.pending()]
        return [attempt for attempt in attempts if attempt is not None]

    def client_of(self, attempt: Attempt) -> Client:
        return self.clients[attempt.generate.request_id.split(".")[0]]

    def perform(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Send(worker_id, message):
                    self.send(worker_id, message)
                case Deliver(request_id, delta):
                    client = self.clients[request_id]
                    assert client.num_ends == 0
                    client.num_prompt_logprobs_received += len(delta.prompt_logprobs)
                    client.received[delta.choice_index].add(delta)
                    client.num_ends += all(received.finish_reason is not None for received in client.received)
                case Fail(request_id, _):
                    self.clients[request_id].num_ends += 1

    def send(self, worker_id: WorkerId, message: Generate | Abort) -> None:
        client = self.clients[message.request_id.split(".")[0]]
        if isinstance(message, Abort):
            assert client.attempt is not None
            assert (client.attempt.worker_id, client.attempt.generate.request_id) == (worker_id, message.request_id)
            return
        present = self.registry.view.find(worker_id)
        assert present is not None and present.incarnation == message.receiver
        assert 0 <= message.dp_rank < len(present.ranks)
        assert (worker_id, message.receiver, message.dp_rank) not in client.refused
        assert (worker_id, message.receiver) not in client.shutting_down
        assert client.num_ends == 0
        assert message.num_choices == len(client.answers)
        if client.attempt is not None:
            self.old_attempts.append(client.attempt)
        num_prompt_logprobs = client.num_prompt_logprobs - message.num_prompt_logprobs_told
        client.attempt = Attempt(worker_id, message, client.answers, num_prompt_logprobs)
        client.num_sends += 1

    def read(self, attempt: Attempt) -> None:
        """The gateway reads the next message of a worker."""
        num_stale = self.dispatcher.num_stale
        self.perform(self.dispatcher.generated(attempt.worker_id, attempt.unread.popleft()))
        assert self.dispatcher.num_stale == num_stale

    @rule(worker_id=st.sampled_from("abc"), num_ranks=st.integers(1, 3))
    def worker_joins(self, worker_id: str, num_ranks: int) -> None:
        self.num_incarnations += 1
        join = join_of(worker_id, self.num_incarnations, num_ranks=num_ranks)
        changes = self.registry.join(join, self.now_ns)
        assert not isinstance(changes, Refused)
        for change in changes:
            if isinstance(change, Left):
                self.perform(self.dispatcher.worker_left(change.worker, self.now_ns))

    @precondition(lambda self: self.registry.view.workers)
    @rule(data=st.data())
    def worker_leaves(self, data: st.DataObject) -> None:
        """What it said and the gateway has not read is lost."""
        worker = data.draw(st.sampled_from(self.registry.view.workers))
        for left in self.registry.leave(worker.worker_id, worker.incarnation):
            self.perform(self.dispatcher.worker_left(left.worker, self.now_ns))

    @rule(answers=ANSWERS, timeout_ns=st.integers(1, 40), has_logprobs=st.booleans(), has_prompt_logprobs=st.booleans())
    def client_asks(
        self, answers: list[tuple[int, int]], timeout_ns: int, *, has_logprobs: bool, has_prompt_logprobs: bool
    ) -> None:
        request_id = f"r{len(self.clients)}"
        client = Client(
            deadline_ns=self.now_ns + timeout_ns,
            answers=[
                Answer(choice_index=index, num_tokens=num_tokens, lag=lag, has_entries=has_logprobs)
                for index, (num_tokens, lag) in enumerate(answers)
            ],
            num_prompt_logprobs=PROMPT_LOGPROBS if has_prompt_logprobs else 0,
            received=[Received() for _ in answers],
        )
        work = work_of(
            request_id,
            num_choices=len(answers),
            num_top_logprobs=0 if has_logprobs else None,
            num_prompt_logprobs=0 if has_prompt_logprobs else None,
            deadline_ns=client.deadline_ns,
        )
        can_be_taken = len(self.pending()) < MAX_PENDING and any(True for _ in self.registry.view.decoding())
        self.clients[request_id] = client
        try:
            self.perform(self.dispatcher.submit(work, self.now_ns))
        except RequestFailed:
            assert not can_be_taken
            client.num_ends += 1
        else:
            assert can_be_taken

    @precondition(lambda self: self.running())
    @rule(data=st.data(), num_tokens=st.integers(1, 4), num_read=st.integers(0, 2))
    def worker_generates(self, data: st.DataObject, num_tokens: int, num_read: int) -> None:
        """The gateway reads some of what it said."""
        attempt = data.draw(st.sampled_from(self.running()))
        attempt.step(data.draw(st.integers(0, len(attempt.answers) - 1)), num_tokens)
        for _ in range(min(num_read, len(attempt.unread))):
            self.read(attempt)

    @precondition(lambda self: self.running())
    @rule(data=st.data(), beyond=st.integers(0, 1))
    def worker_errs(self, data: st.DataObject, beyond: int) -> None:
        """It speaks of a choice that has finished or that nobody asked for, in vain."""
        attempt = data.draw(st.sampled_from(self.running()))
        received = self.client_of(attempt).received
        finished = [index for index, choice in enumerate(received) if choice.finish_reason is not None]
        choice_index = data.draw(st.sampled_from([*finished, len(received) + beyond, -1]))
        num_stale = self.dispatcher.num_stale
        wrong = delta_of(attempt.generate, choice_index=choice_index)
        assert self.dispatcher.generated(attempt.worker_id, wrong) == []
        assert self.dispatcher.num_stale == num_stale + 1

    @precondition(lambda self: self.running())
    @rule(data=st.data(), kind=st.sampled_from(FailureKind))
    def worker_fails(self, data: st.DataObject, kind: FailureKind) -> None:
        """After all that it said before."""
        attempt = data.draw(st.sampled_from(self.running()))
        client, generate = self.client_of(attempt), attempt.generate
        while attempt.unread:
            self.read(attempt)
        if client.num_ends:
            return
        if kind is FailureKind.CAPACITY:
            client.refused.add((attempt.worker_id, generate.receiver, generate.dp_rank))
        elif kind is FailureKind.SHUTTING_DOWN:
            client.shutting_down.add((attempt.worker_id, generate.receiver))
        self.perform(self.dispatcher.failed(attempt.worker_id, failed_of(generate, kind), self.now_ns))

    @precondition(lambda self: self.pending() or self.old_attempts)
    @rule(data=st.data(), thief=st.sampled_from("abc"))
    def stale_traffic_arrives(self, data: st.DataObject, thief: str) -> None:
        """Of an earlier attempt by its worker, or of a running one by another worker: never applied."""
        stolen = [(WorkerId(thief), attempt.generate) for attempt in self.running() if attempt.worker_id != thief]
        if stale := [*((attempt.worker_id, attempt.generate) for attempt in self.old_attempts), *stolen]:
            worker_id, generate = data.draw(st.sampled_from(stale))
            num_stale = self.dispatcher.num_stale
            assert self.dispatcher.generated(worker_id, delta_of(generate, text="stale", finishes=True)) == []
            assert self.dispatcher.failed(worker_id, failed_of(generate, FailureKind.INTERNAL), 0) == []
            assert self.dispatcher.num_stale == num_stale + 2

    @precondition(lambda self: self.clients)
    @rule(data=st.data())
    def client_leaves(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.clients)))
        actions = self.dispatcher.cancel(RequestId(request_id))
        self.perform(actions)
        assert bool(actions) == (self.clients[request_id].num_ends == 0)
        self.clients[request_id].num_ends = 1

    @rule(duration_ns=st.integers(0, 3))
    def time_passes(self, duration_ns: int) -> None:
        self.now_ns += duration_ns
        self.perform(self.dispatcher.expire(self.now_ns))
        assert all(self.clients[request_id].deadline_ns > self.now_ns for request_id in self.pending())

    @invariant()
    def every_request_is_pending_or_ended_once(self) -> None:
        assert all(client.num_ends <= 1 for client in self.clients.values())
        assert all(client.num_sends <= 1 + MAX_RETRIES for client in self.clients.values())
        assert self.dispatcher.num_pending == len(self.pending()) <= MAX_PENDING

    @invariant()
    def clients_have_what_an_undisturbed_worker_would_have_told(self) -> None:
        for client in self.clients.values():
            assert all(map(Received.is_of, client.received, client.answers))
            assert client.num_prompt_logprobs_received <= client.num_prompt_logprobs
            if any(received.token_ids for received in client.received):
                assert client.num_prompt_logprobs_received == client.num_prompt_logprobs

    def teardown(self) -> None:
        self.perform(self.dispatcher.shut_down())
        assert self.dispatcher.num_pending == 0
        assert all(client.num_ends == 1 for client in self.clients.values())


DispatcherMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestDispatcherMachine = DispatcherMachine.TestCase
