"""The dispatcher as a state machine: each request ends exactly once, whatever workers and clients do (rule H7)."""

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pdserve.cluster.registry import Left, Refused, Registry
from pdserve.config.role import Role
from pdserve.gateway.dispatcher import MAX_RETRIES, Action, Deliver, Dispatcher, Fail, Restart, Send, Work
from pdserve.gateway.failures import RequestFailed
from pdserve.ids import Incarnation, RequestId, WorkerId
from pdserve.sampling import SamplingParams
from pdserve.units import NS_PER_S
from pdserve.wire.cluster import Abort, Delta, Failed, FailureKind, FinishReason, Generate, Generated, Join, Load
from pdserve.wire.peer import PROTOCOL_VERSION

MAX_PENDING = 4


def work_of(request_id: str, *, streams: bool = True, deadline_ns: int = NS_PER_S) -> Work:
    return Work(
        request_id=RequestId(request_id),
        prompt_token_ids=(1, 2, 3),
        sampling=SamplingParams(max_tokens=8),
        deadline_ns=deadline_ns,
        streams=streams,
    )


def join_of(worker_id: str, incarnation: int, *, num_ranks: int = 1) -> Join:
    return Join(
        protocol_version=PROTOCOL_VERSION,
        worker_id=WorkerId(worker_id),
        incarnation=Incarnation(incarnation),
        role=Role.DECODE,
        url="http://w",
        model_name="m",
        model_fingerprint="f",
        max_model_len=64,
        lease_s=10.0,
        tensor_parallel_size=1,
        loads=(Load(),) * num_ranks,
    )


def cluster_of(*worker_ids: str, num_ranks: int = 1) -> tuple[Registry, Dispatcher]:
    registry = Registry(model_name="m", max_workers=8)
    for worker_id in worker_ids:
        assert not isinstance(registry.join(join_of(worker_id, 1, num_ranks=num_ranks), 0), Refused)
    return registry, Dispatcher(registry, max_pending=MAX_PENDING)


def sent(actions: list[Action]) -> tuple[WorkerId, Generate]:
    (action,) = actions
    assert isinstance(action, Send) and isinstance(action.message, Generate)
    return action.worker_id, action.message


def delta_of(generate: Generate, *, text: str = "t", finishes: bool = False) -> Generated:
    delta = Delta(
        request_id=generate.request_id,
        token_ids=(1,),
        text=text,
        finish_reason=FinishReason.STOP if finishes else None,
    )
    return Generated(sender=generate.receiver, deltas=(delta,))


def failed_of(generate: Generate, kind: FailureKind) -> Failed:
    return Failed(sender=generate.receiver, request_id=generate.request_id, kind=kind, message="no")


def test_submit_gives_the_worker_what_is_left_of_the_time() -> None:
    _, dispatcher = cluster_of("a")
    _, generate = sent(dispatcher.submit(work_of("r", deadline_ns=5 * NS_PER_S), 2 * NS_PER_S))
    assert generate.timeout_s == 3.0
    assert generate.request_id == "r"


def test_submit_over_the_bound_or_without_worker_leaves_nothing_pending() -> None:
    registry, dispatcher = cluster_of("a")
    for index in range(MAX_PENDING):
        dispatcher.submit(work_of(f"r{index}"), 0)
    with pytest.raises(RequestFailed) as raised:
        dispatcher.submit(work_of("over"), 0)
    assert raised.value.failure.status == 429
    dispatcher.shut_down()
    registry.leave(WorkerId("a"), Incarnation(1))
    with pytest.raises(RequestFailed) as raised:
        dispatcher.submit(work_of("nobody"), 0)
    assert raised.value.failure.status == 503
    assert dispatcher.num_pending == 0


def test_worker_left_after_a_streamed_delta_fails_the_request() -> None:
    registry, dispatcher = cluster_of("a", "b")
    worker_id, generate = sent(dispatcher.submit(work_of("r"), 0))
    dispatcher.generated(worker_id, delta_of(generate))
    (left,) = registry.leave(worker_id, generate.receiver)
    (action,) = dispatcher.worker_left(left.worker, 0)
    assert isinstance(action, Fail) and action.failure.code == "worker_lost"


def test_worker_left_after_an_unstreamed_delta_restarts_the_request() -> None:
    registry, dispatcher = cluster_of("a", "b")
    worker_id, generate = sent(dispatcher.submit(work_of("r", streams=False), 0))
    dispatcher.generated(worker_id, delta_of(generate))
    (left,) = registry.leave(worker_id, generate.receiver)
    restart, retry = dispatcher.worker_left(left.worker, 0)
    assert restart == Restart(RequestId("r"))
    retried_on, second = sent([retry])
    assert (retried_on, second.request_id) == ("b", "r.1")
    assert dispatcher.generated(worker_id, delta_of(generate)) == []
    assert dispatcher.num_stale == 1


def test_capacity_refusals_ask_each_worker_once() -> None:
    _, dispatcher = cluster_of("a", "b")
    first, generate = sent(dispatcher.submit(work_of("r"), 0))
    second, again = sent(dispatcher.failed(first, failed_of(generate, FailureKind.CAPACITY), 0))
    assert {first, second} == {"a", "b"}
    (action,) = dispatcher.failed(second, failed_of(again, FailureKind.CAPACITY), 0)
    assert isinstance(action, Fail) and action.failure.status == 429


def test_capacity_refusals_ask_each_rank_once_before_the_client_hears_of_it() -> None:
    _, dispatcher = cluster_of("a", num_ranks=2)
    worker_id, generate = sent(dispatcher.submit(work_of("r"), 0))
    _, again = sent(dispatcher.failed(worker_id, failed_of(generate, FailureKind.CAPACITY), 0))
    assert (generate.dp_rank, again.dp_rank) == (0, 1)
    (action,) = dispatcher.failed(worker_id, failed_of(again, FailureKind.CAPACITY), 0)
    assert isinstance(action, Fail) and action.failure.status == 429


def test_worker_that_shuts_down_is_asked_on_none_of_its_ranks_again() -> None:
    _, dispatcher = cluster_of("a", num_ranks=3)
    worker_id, generate = sent(dispatcher.submit(work_of("r"), 0))
    (action,) = dispatcher.failed(worker_id, failed_of(generate, FailureKind.SHUTTING_DOWN), 0)
    assert isinstance(action, Fail) and action.failure.code == "shutting_down"


def test_worker_left_takes_the_requests_of_all_its_ranks_with_it() -> None:
    registry, dispatcher = cluster_of("a", num_ranks=2)
    for index in range(2):
        dispatcher.submit(work_of(f"r{index}"), 0)
    registry.join(join_of("b", 1, num_ranks=2), 0)
    (left,) = registry.leave(WorkerId("a"), Incarnation(1))
    moved = [sent([action]) for action in dispatcher.worker_left(left.worker, 0)]
    assert [(worker_id, generate.dp_rank) for worker_id, generate in moved] == [("b", 0), ("b", 1)]


def test_submit_spreads_a_burst_over_the_ranks_of_unequal_workers() -> None:
    registry, dispatcher = cluster_of("a", num_ranks=3)
    registry.join(join_of("b", 1), 0)
    places = [sent(dispatcher.submit(work_of(f"r{index}"), 0)) for index in range(MAX_PENDING)]
    assert [(worker_id, generate.dp_rank) for worker_id, generate in places] == [
        ("a", 0),
        ("a", 1),
        ("a", 2),
        ("b", 0),
    ]


def test_lost_request_is_sent_to_at_most_three_workers() -> None:
    registry, dispatcher = cluster_of("a", "b", "c", "d")
    actions = dispatcher.submit(work_of("r"), 0)
    for _ in range(MAX_RETRIES):
        worker_id, generate = sent(actions)
        (left,) = registry.leave(worker_id, generate.receiver)
        actions = dispatcher.worker_left(left.worker, 0)
    worker_id, generate = sent(actions)
    (left,) = registry.leave(worker_id, generate.receiver)
    (action,) = dispatcher.worker_left(left.worker, 0)
    assert isinstance(action, Fail)


def test_lost_workers_requests_spread_over_those_that_are_left() -> None:
    registry, dispatcher = cluster_of("a")
    for index in range(MAX_PENDING):
        dispatcher.submit(work_of(f"r{index}"), 0)
    for worker_id in "bc":
        registry.join(join_of(worker_id, 1), 0)
    (left,) = registry.leave(WorkerId("a"), Incarnation(1))
    targets = [sent([action])[0] for action in dispatcher.worker_left(left.worker, 0)]
    assert sorted(targets) == ["b", "b", "c", "c"]


@dataclass
class Client:
    """What the model of one request knows."""

    streams: bool
    deadline_ns: int
    num_ends: int = 0
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
                    client.delivered.append(delta.text)
                    client.num_ends += delta.finish_reason is not None
                case Restart(request_id):
                    assert not self.clients[request_id].streams
                    self.clients[request_id].delivered.clear()
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

    @rule(streams=st.booleans(), timeout_ns=st.integers(1, 40))
    def client_asks(self, streams: bool, timeout_ns: int) -> None:
        request_id = f"r{len(self.clients)}"
        client = Client(streams, self.now_ns + timeout_ns)
        work = work_of(request_id, streams=streams, deadline_ns=client.deadline_ns)
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
    @rule(data=st.data(), finishes=st.booleans())
    def worker_generates(self, data: st.DataObject, finishes: bool) -> None:
        worker_id, generate = data.draw(st.sampled_from(self.running()))
        self.perform(self.dispatcher.generated(worker_id, delta_of(generate, finishes=finishes)))

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
