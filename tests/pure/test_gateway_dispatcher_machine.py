"""The dispatcher as a state machine: each request ends exactly once, whatever workers and clients do (rule H7)."""

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.pure.dispatcher_side import MAX_PENDING, cluster_of, delta_of, failed_of, join_of, work_of

from pdserve.cluster.registry import Left, Refused
from pdserve.gateway.dispatcher import MAX_RETRIES, Action, Deliver, Fail, Restart, Send
from pdserve.gateway.failures import RequestFailed
from pdserve.ids import Incarnation, RequestId, WorkerId
from pdserve.wire.cluster import Abort, FailureKind, Generate


@dataclass
class Client:
    """What the model of one request knows."""

    streams: bool
    deadline_ns: int
    num_choices: int = 1
    num_ends: int = 0
    finished: set[int] = field(default_factory=set[int])
    """Choices of the running attempt."""
    num_sends: int = 0
    delivered: list[str] = field(default_factory=list[str])
    attempt: tuple[WorkerId, Generate] | None = None
    refused: set[tuple[WorkerId, Incarnation, int]] = field(default_factory=set[tuple[WorkerId, Incarnation, int]])
    """Ranks that were full."""
    shutting_down: set[tuple[WorkerId, Incarnation]] = field(default_factory=set[tuple[WorkerId, Incarnation]])


class DispatcherMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.registry, self.dispatcher = cluster_of("a", "b")
        self.clients: dict[str, Client] = {}
        self.old_attempts: list[tuple[WorkerId, Generate]] = []
        self.num_incarnations = 1
        self.now_ns = 0

    def pending(self) -> list[str]:
        return [request_id for request_id, client in self.clients.items() if client.num_ends == 0]

    def running(self) -> list[tuple[WorkerId, Generate]]:
        """The attempts of pending requests."""
        attempts = [self.clients[request_id].attempt for request_id in self.pending()]
        return [attempt for attempt in attempts if attempt is not None]

    def perform(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Send(worker_id, message):
                    self.send(worker_id, message)
                case Deliver(request_id, delta):
                    client = self.clients[request_id]
                    assert client.num_ends == 0
                    assert delta.choice_index in set(range(client.num_choices)) - client.finished
                    client.delivered.append(delta.text)
                    if delta.finish_reason is not None:
                        client.finished.add(delta.choice_index)
                    client.num_ends += len(client.finished) == client.num_choices
                case Restart(request_id):
                    assert not self.clients[request_id].streams
                    self.clients[request_id].delivered.clear()
                    self.clients[request_id].finished.clear()
                case Fail(request_id, _):
                    self.clients[request_id].num_ends += 1

    def send(self, worker_id: WorkerId, message: Generate | Abort) -> None:
        client = self.clients[message.request_id.split(".")[0]]
        if isinstance(message, Abort):
            assert client.attempt is not None
            assert (client.attempt[0], client.attempt[1].request_id) == (worker_id, message.request_id)
            return
        present = self.registry.view.find(worker_id)
        assert present is not None and present.incarnation == message.receiver
        assert 0 <= message.dp_rank < len(present.ranks)
        assert (worker_id, message.receiver, message.dp_rank) not in client.refused
        assert (worker_id, message.receiver) not in client.shutting_down
        assert client.num_ends == 0
        assert not (client.streams and client.delivered)
        assert message.num_choices == client.num_choices and not client.finished
        if client.attempt is not None:
            self.old_attempts.append(client.attempt)
        client.attempt = (worker_id, message)
        client.num_sends += 1

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
        worker = data.draw(st.sampled_from(self.registry.view.workers))
        for left in self.registry.leave(worker.worker_id, worker.incarnation):
            self.perform(self.dispatcher.worker_left(left.worker, self.now_ns))

    @rule(streams=st.booleans(), timeout_ns=st.integers(1, 40), num_choices=st.integers(1, 3))
    def client_asks(self, streams: bool, timeout_ns: int, num_choices: int) -> None:
        request_id = f"r{len(self.clients)}"
        client = Client(streams, self.now_ns + timeout_ns, num_choices)
        work = work_of(request_id, streams=streams, num_choices=num_choices, deadline_ns=client.deadline_ns)
        can_be_taken = len(self.pending()) < MAX_PENDING and any(True for _ in self.registry.view.decoding())
        self.clients[request_id] = client
        try:
            self.perform(self.dispatcher.submit(work, self.now_ns))
        except RequestFailed:
            assert not can_be_taken
            client.num_ends += 1
        else:
            assert can_be_taken

    @precondition(lambda self: self.pending())
    @rule(data=st.data(), finishes=st.booleans(), choice_index=st.integers(0, 3))
    def worker_generates(self, data: st.DataObject, finishes: bool, choice_index: int) -> None:
        """Of a choice that is open, or else in vain."""
        worker_id, generate = data.draw(st.sampled_from(self.running()))
        client = self.clients[generate.request_id.split(".")[0]]
        is_open = choice_index < client.num_choices and choice_index not in client.finished
        num_stale = self.dispatcher.num_stale
        delta = delta_of(generate, text="t" if is_open else "stale", finishes=finishes, choice_index=choice_index)
        self.perform(self.dispatcher.generated(worker_id, delta))
        assert self.dispatcher.num_stale == num_stale + (not is_open)

    @precondition(lambda self: self.pending())
    @rule(data=st.data(), kind=st.sampled_from(FailureKind))
    def worker_fails(self, data: st.DataObject, kind: FailureKind) -> None:
        worker_id, generate = data.draw(st.sampled_from(self.running()))
        client = self.clients[generate.request_id.split(".")[0]]
        if kind is FailureKind.CAPACITY:
            client.refused.add((worker_id, generate.receiver, generate.dp_rank))
        elif kind is FailureKind.SHUTTING_DOWN:
            client.shutting_down.add((worker_id, generate.receiver))
        self.perform(self.dispatcher.failed(worker_id, failed_of(generate, kind), self.now_ns))

    @precondition(lambda self: self.pending() or self.old_attempts)
    @rule(data=st.data(), thief=st.sampled_from("abc"))
    def stale_traffic_arrives(self, data: st.DataObject, thief: str) -> None:
        """Of an earlier attempt by its worker, or of a running one by another worker: never applied."""
        stolen = [(WorkerId(thief), generate) for owner, generate in self.running() if owner != thief]
        if stale := [*self.old_attempts, *stolen]:
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
        assert not any("stale" in client.delivered for client in self.clients.values())

    def teardown(self) -> None:
        self.perform(self.dispatcher.shut_down())
        assert self.dispatcher.num_pending == 0
        assert all(client.num_ends == 1 for client in self.clients.values())


DispatcherMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestDispatcherMachine = DispatcherMachine.TestCase
