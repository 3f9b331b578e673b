"""Routing over time: after any changes, the choice is that of somebody who looks at all workers anew."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from pdserve.cluster.registry import Refused, Registry
from pdserve.cluster.view import RankView, WorkerView
from pdserve.config.role import Role
from pdserve.errors import CapacityError
from pdserve.ids import Incarnation, WorkerId
from pdserve.routing import order
from pdserve.routing.least_loaded import LeastLoaded
from pdserve.wire.cluster import Join, Load, WorkerHeartbeat
from pdserve.wire.peer import PROTOCOL_VERSION

LOADS = st.builds(
    Load,
    num_running=st.integers(0, 3),
    num_waiting_tokens=st.integers(0, 3),
    num_free_pages=st.integers(0, 2),
    num_pages=st.just(2),
)
WORKER_IDS = st.sampled_from([WorkerId(name) for name in "abcd"])


def slow_decode_choice(
    registry: Registry, excluded: frozenset[WorkerId], excluded_ranks: frozenset[tuple[WorkerId, int]]
) -> tuple[WorkerId, int] | None:
    def load(candidate: tuple[WorkerView, RankView]) -> tuple[bool, int, int, int, WorkerId, int]:
        worker, rank = candidate
        free = rank.load.num_free_pages
        return rank.is_full, rank.num_sequences, -free, rank.num_turns, worker.worker_id, rank.dp_rank

    allowed = [
        (worker, rank)
        for worker, rank in registry.view.decoding_ranks()
        if worker.worker_id not in excluded and (worker.worker_id, rank.dp_rank) not in excluded_ranks
    ]
    chosen = min(allowed, key=load, default=None)
    return None if chosen is None else (chosen[0].worker_id, chosen[1].dp_rank)


def slow_prefill_choice(registry: Registry, excluded: frozenset[WorkerId]) -> WorkerId | None:
    def load(worker: WorkerView) -> tuple[int, int, WorkerId]:
        return worker.ranks[0].num_waiting_tokens, worker.ranks[0].num_turns, worker.worker_id

    allowed = [worker for worker in registry.view.taking_grants() if worker.worker_id not in excluded]
    chosen = min(allowed, key=load, default=None)
    return None if chosen is None else chosen.worker_id


class ChoicesOverTime(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.registry = Registry(model_name="m", max_workers=8)
        self.balance = LeastLoaded()
        self.num_incarnations = 0

    @rule(worker_id=WORKER_IDS, role=st.sampled_from(Role), loads=st.lists(LOADS, min_size=1, max_size=3))
    def joins(self, worker_id: WorkerId, role: Role, loads: list[Load]) -> None:
        self.num_incarnations += 1
        join = Join(
            protocol_version=PROTOCOL_VERSION,
            worker_id=worker_id,
            incarnation=Incarnation(self.num_incarnations),
            role=role,
            url="http://w",
            model_name="m",
            model_fingerprint="f",
            max_model_len=100,
            lease_s=1.0,
            tensor_parallel_size=1,
            loads=tuple(loads[:1] if role is Role.PREFILL else loads),
        )
        assert not isinstance(self.registry.join(join, 0), Refused)

    @precondition(lambda self: self.registry.view.workers)
    @rule(data=st.data(), draining=st.booleans())
    def beats(self, data: st.DataObject, *, draining: bool) -> None:
        worker = data.draw(st.sampled_from(self.registry.view.workers))
        loads = tuple(data.draw(LOADS) for _ in worker.ranks)
        beat = WorkerHeartbeat(sender=worker.incarnation, loads=loads, draining=draining)
        assert self.registry.heartbeat(worker.worker_id, beat, 0)

    @precondition(lambda self: self.registry.view.workers)
    @rule(data=st.data())
    def leaves(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(self.registry.view.workers))
        assert self.registry.leave(worker.worker_id, worker.incarnation)

    @rule(
        excluded=st.frozensets(WORKER_IDS, max_size=2),
        excluded_ranks=st.frozensets(st.tuples(WORKER_IDS, st.integers(0, 2)), max_size=2),
    )
    def is_chosen(self, excluded: frozenset[WorkerId], excluded_ranks: frozenset[tuple[WorkerId, int]]) -> None:
        wanted = slow_decode_choice(self.registry, excluded, excluded_ranks)
        self.balance.update(self.registry.take_changed())
        try:
            route = self.balance.choose(num_prompt_tokens=10, excluded_workers=excluded, excluded_ranks=excluded_ranks)
        except CapacityError:
            assert wanted is None
            return
        assert (route.decode.worker_id, route.dp_rank) == wanted
        assert route.decode == self.registry.view.find(route.decode.worker_id)
        prefill = None if route.prefill is None else route.prefill.worker_id
        assert prefill == (slow_prefill_choice(self.registry, excluded) if route.decode.role is Role.DECODE else None)
        self.registry.dispatched(route.decode.worker_id, dp_rank=route.dp_rank, num_sequences=1, num_tokens=0)
        if prefill is not None:
            self.registry.dispatched(prefill, dp_rank=0, num_sequences=1, num_tokens=10)


TestChoicesOverTime = ChoicesOverTime.TestCase


def test_order_of_ranks_that_change_often_stays_small() -> None:
    places = order.Order[tuple[int]]()
    for turn in range(10_000):
        places.put((WorkerId("a"), turn % 4), (turn,))
    assert places.first(is_allowed=lambda rank: rank[1] != 0) == ("a", 1)
    assert places.num_kept <= 2 * 4 + order.MIN_OUTDATED
