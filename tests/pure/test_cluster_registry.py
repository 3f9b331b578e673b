"""The registry: each refusal, each way to leave, and a state machine against a slow obvious model."""

from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pdserve.cluster import registry as registry_module
from pdserve.cluster.registry import MAX_LEASE_S, MAX_RANKS, Joined, LeaveReason, Left, Refused, Registry
from pdserve.config.role import Role
from pdserve.errors import RemoteProtocolError
from pdserve.ids import Incarnation, WorkerId
from pdserve.units import NS_PER_S
from pdserve.wire.cluster import Join, Load, WorkerHeartbeat
from pdserve.wire.peer import PROTOCOL_VERSION

FULL_LOAD = Load(num_running=3, num_waiting=2, num_waiting_tokens=500, num_free_pages=7, num_pages=64)


def join_of(worker_id: str = "d0", **changed: Any) -> Join:
    join = Join(
        protocol_version=PROTOCOL_VERSION,
        worker_id=WorkerId(worker_id),
        incarnation=Incarnation(1),
        role=Role.DECODE,
        url="http://127.0.0.1:8101",
        model_name="smol",
        model_fingerprint="f1",
        max_model_len=2048,
        lease_s=1.0,
        tensor_parallel_size=1,
        loads=(Load(),),
    )
    return msgspec.structs.replace(join, **changed)


def new_registry(max_workers: int = 4) -> Registry:
    return Registry(model_name="smol", max_workers=max_workers)


def beat_of(*loads: Load, incarnation: int = 1, num_prefill_peers: int = 0, draining: bool = False) -> WorkerHeartbeat:
    return WorkerHeartbeat(
        sender=Incarnation(incarnation), loads=loads, num_prefill_peers=num_prefill_peers, draining=draining
    )


def joined(registry: Registry, join: Join, now_ns: int = 0) -> tuple[Left | Joined, ...]:
    changes = registry.join(join, now_ns)
    assert not isinstance(changes, Refused), changes
    return changes


def load_figures(registry: Registry) -> list[tuple[int, int, int]]:
    """Of each rank of the one worker: its number, sequences and waiting tokens."""
    (worker,) = registry.view.workers
    return [(rank.dp_rank, rank.num_sequences, rank.num_waiting_tokens) for rank in worker.ranks]


def test_registry_join_appears_in_the_view_sorted_by_id() -> None:
    registry = new_registry()
    for worker_id in ("d1", "p0", "d0"):
        (change,) = joined(registry, join_of(worker_id))
        assert isinstance(change, Joined)
    assert [worker.worker_id for worker in registry.view.workers] == ["d0", "d1", "p0"]


@pytest.mark.parametrize(
    ("changed", "values"),
    [
        ({"protocol_version": 99}, [str(PROTOCOL_VERSION), "99"]),
        ({"model_name": "other"}, ["'smol'", "'other'"]),
        ({"model_fingerprint": "f2"}, ["'f1'", "'f2'"]),
        ({"lease_s": MAX_LEASE_S + 1}, ["60", "61"]),
        ({"lease_s": 0.0}, ["0.2", "0"]),
        ({"lease_s": float("nan")}, ["nan"]),
        ({"max_model_len": 0}, ["0"]),
        ({"loads": ()}, ["1024", "says 0"]),
        ({"loads": (Load(),) * (MAX_RANKS + 1)}, ["1024", "1025"]),
        ({"loads": (Load(),) * 2, "role": Role.PREFILL}, ["has 1 ", "says 2"]),
    ],
)
def test_registry_join_that_differs_is_refused_with_both_values(changed: dict[str, Any], values: list[str]) -> None:
    registry = new_registry()
    joined(registry, join_of("first"))
    before = registry.view
    refusal = registry.join(join_of("second", **changed), 0)
    assert isinstance(refusal, Refused)
    assert all(value in refusal.message for value in values)
    assert registry.view is before


def test_registry_join_over_the_bound_is_refused_but_a_restart_is_not() -> None:
    registry = new_registry(max_workers=1)
    joined(registry, join_of("d0"))
    assert isinstance(registry.join(join_of("d1"), 0), Refused)
    joined(registry, join_of("d0", incarnation=Incarnation(2)))


def test_registry_restart_replaces_and_the_old_incarnation_never_comes_back() -> None:
    registry = new_registry()
    joined(registry, join_of(incarnation=Incarnation(1)))
    left, entered = joined(registry, join_of(incarnation=Incarnation(2)), 5)
    assert isinstance(left, Left) and left.reason is LeaveReason.REPLACED and left.worker.incarnation == 1
    assert isinstance(entered, Joined) and entered.worker.incarnation == 2
    assert not registry.heartbeat(WorkerId("d0"), beat_of(FULL_LOAD), 6)
    assert registry.leave(WorkerId("d0"), Incarnation(1)) == ()
    assert isinstance(registry.join(join_of(incarnation=Incarnation(1)), 7), Refused)
    assert registry.view.workers[0].ranks[0].load == Load()


def test_registry_reconnect_of_the_same_incarnation_replaces_itself() -> None:
    registry = new_registry()
    joined(registry, join_of())
    left, entered = joined(registry, join_of(), 5)
    assert isinstance(left, Left) and isinstance(entered, Joined)
    assert entered.worker.joined_ns == 5


def test_registry_restart_with_other_weights_is_refused_only_beside_others() -> None:
    registry = new_registry()
    joined(registry, join_of("d0"))
    joined(registry, join_of("d0", incarnation=Incarnation(2), model_fingerprint="f2"))
    assert registry.fingerprint == "f2"
    assert isinstance(registry.join(join_of("d1"), 0), Refused)


def test_registry_fingerprint_is_free_again_once_everybody_left() -> None:
    registry = new_registry()
    joined(registry, join_of("d0"))
    registry.leave(WorkerId("d0"), Incarnation(1))
    assert registry.fingerprint is None
    joined(registry, join_of("d1", model_fingerprint="f2"))


def test_registry_lease_ends_at_its_deadline_and_a_heartbeat_renews_it() -> None:
    registry = new_registry()
    joined(registry, join_of(lease_s=1.0))
    assert registry.heartbeat(WorkerId("d0"), beat_of(FULL_LOAD), NS_PER_S // 2)
    assert registry.expire(NS_PER_S) == ()
    (left,) = registry.expire(3 * NS_PER_S // 2)
    assert left.reason is LeaveReason.EXPIRED
    assert registry.view.workers == ()
    joined(registry, join_of())


def test_registry_dispatched_counts_until_the_next_heartbeat() -> None:
    registry = new_registry()
    joined(registry, join_of(loads=(FULL_LOAD, Load())))
    for num_tokens in (100, 50):
        registry.dispatched(WorkerId("d0"), dp_rank=0, num_sequences=1, num_tokens=num_tokens)
    registry.dispatched(WorkerId("d0"), dp_rank=1, num_sequences=1, num_tokens=7)
    assert load_figures(registry) == [(0, 7, 650), (1, 1, 7)]
    registry.heartbeat(WorkerId("d0"), beat_of(FULL_LOAD, FULL_LOAD), 1)
    assert load_figures(registry) == [(0, 5, 500), (1, 5, 500)]
    registry.dispatched(WorkerId("nobody"), dp_rank=0, num_sequences=1, num_tokens=1)


@pytest.mark.parametrize("num_loads", [0, 1, 3])
def test_registry_heartbeat_with_another_number_of_ranks_is_the_workers_error(num_loads: int) -> None:
    registry = new_registry()
    joined(registry, join_of(loads=(Load(), Load())))
    before = registry.view
    with pytest.raises(RemoteProtocolError, match=f"{num_loads} loads .* 2 data parallel ranks") as raised:
        registry.heartbeat(WorkerId("d0"), beat_of(*(FULL_LOAD,) * num_loads), 1)
    assert raised.value.peer == "d0"
    assert registry.view is before
    assert not registry.heartbeat(WorkerId("d0"), beat_of(FULL_LOAD, incarnation=2), 1)


def test_registry_join_of_many_ranks_is_taken_up_to_the_bound() -> None:
    registry = new_registry()
    joined(registry, join_of(loads=(Load(),) * MAX_RANKS))
    (worker,) = registry.view.workers
    assert [rank.dp_rank for rank in worker.ranks] == list(range(MAX_RANKS))


def test_registry_restart_may_have_another_number_of_ranks() -> None:
    registry = new_registry()
    joined(registry, join_of(loads=(Load(), Load())))
    joined(registry, join_of(incarnation=Incarnation(2)))
    assert registry.heartbeat(WorkerId("d0"), beat_of(FULL_LOAD, incarnation=2), 1)
    with pytest.raises(RemoteProtocolError):
        registry.heartbeat(WorkerId("d0"), beat_of(FULL_LOAD, FULL_LOAD, incarnation=2), 1)


def test_registry_heartbeat_tells_how_many_prefill_workers_are_connected() -> None:
    registry = new_registry()
    joined(registry, join_of())
    registry.heartbeat(WorkerId("d0"), beat_of(Load(), num_prefill_peers=3), 1)
    registry.dispatched(WorkerId("d0"), dp_rank=0, num_sequences=1, num_tokens=1)
    assert registry.view.workers[0].num_prefill_peers == 3


def test_registry_heartbeat_tells_that_a_worker_drains_and_it_is_given_nothing_new() -> None:
    registry = new_registry()
    joined(registry, join_of("d0"))
    joined(registry, join_of("p0", role=Role.PREFILL))
    for worker_id in ("d0", "p0"):
        registry.heartbeat(WorkerId(worker_id), beat_of(Load(), draining=True), 1)
    view = registry.view
    assert [(worker.worker_id, worker.draining) for worker in view.workers] == [("d0", True), ("p0", True)]
    assert [*view.decoding(), *view.decoding_ranks(), *view.taking_grants()] == []
    assert registry.max_model_len is None
    assert [worker.worker_id for worker in view.prefilling()] == ["p0"], "its handoffs need their connections"


def test_registry_join_later_than_its_process_keeps_the_successor_out_only_while_it_is_there() -> None:
    registry = new_registry()
    joined(registry, join_of(incarnation=Incarnation(2)))
    joined(registry, join_of(incarnation=Incarnation(1)))
    assert isinstance(registry.join(join_of(incarnation=Incarnation(2)), 0), Refused)
    registry.leave(WorkerId("d0"), Incarnation(1))
    joined(registry, join_of(incarnation=Incarnation(2)))
    joined(registry, join_of(incarnation=Incarnation(2)))


def test_registry_superseded_incarnations_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_module, "MAX_SUPERSEDED", 2)
    registry = new_registry()
    for incarnation in range(1, 6):
        joined(registry, join_of(incarnation=Incarnation(incarnation)))
    assert isinstance(registry.join(join_of(incarnation=Incarnation(4)), 0), Refused)
    assert isinstance(registry.join(join_of(incarnation=Incarnation(3)), 0), Refused)
    joined(registry, join_of(incarnation=Incarnation(1)))


def test_registry_max_model_len_after_changes_is_known_without_a_view(monkeypatch: pytest.MonkeyPatch) -> None:
    """A view lists all workers, which is too much to make for each request."""
    registry = new_registry(max_workers=1000)
    monkeypatch.setattr(registry_module, "ClusterView", None)
    for number in range(1000):
        joined(registry, join_of(f"d{number}", max_model_len=2048 - number % 3))
        assert registry.max_model_len == 2048 - min(number, 2)
        registry.dispatched(WorkerId(f"d{number}"), dp_rank=0, num_sequences=1, num_tokens=10)
    for number in range(2, 1000, 3):
        assert registry.max_model_len == 2046
        registry.leave(WorkerId(f"d{number}"), Incarnation(1))
    assert registry.max_model_len == 2047


@dataclass
class ModelWorker:
    incarnation: int
    deadline_ns: int
    sequences: list[int]
    """By rank: reported, and dispatched since."""
    max_model_len: int
    """0: it only prefills."""
    draining: bool = False


WORKER_IDS = st.sampled_from(["a", "b", "c"])
INCARNATIONS = st.integers(1, 4)


class RegistryMachine(RuleBasedStateMachine):
    """Against a dictionary that is written down as plainly as possible."""

    def __init__(self) -> None:
        super().__init__()
        self.registry = new_registry(max_workers=2)
        self.model: dict[str, ModelWorker] = {}
        self.superseded: set[tuple[str, int]] = set()
        self.present: set[tuple[str, int]] = set()
        self.now_ns = 0

    @rule(
        worker_id=WORKER_IDS,
        incarnation=INCARNATIONS,
        num_ranks=st.integers(1, 3),
        max_model_len=st.sampled_from([512, 1024, 2048]),
        may_prefill=st.booleans(),
    )
    def join(self, worker_id: str, incarnation: int, num_ranks: int, *, max_model_len: int, may_prefill: bool) -> None:
        only_prefills = may_prefill and num_ranks == 1
        join = join_of(
            worker_id,
            incarnation=Incarnation(incarnation),
            loads=(Load(),) * num_ranks,
            max_model_len=max_model_len,
            role=Role.PREFILL if only_prefills else Role.DECODE,
        )
        changes = self.registry.join(join, self.now_ns)
        room = worker_id in self.model or len(self.model) < 2
        other_is_present = worker_id in self.model and self.model[worker_id].incarnation != incarnation
        is_superseded = other_is_present and (worker_id, incarnation) in self.superseded
        assert isinstance(changes, Refused) == (is_superseded or not room)
        if isinstance(changes, Refused):
            return
        self.apply(changes)
        if other_is_present:
            self.superseded.add((worker_id, self.model[worker_id].incarnation))
        self.model[worker_id] = ModelWorker(
            incarnation, self.now_ns + NS_PER_S, [0] * num_ranks, 0 if only_prefills else max_model_len
        )

    @rule(
        worker_id=WORKER_IDS,
        incarnation=INCARNATIONS,
        counts=st.lists(st.integers(0, 5), max_size=3),
        draining=st.booleans(),
    )
    def heartbeat(self, worker_id: str, incarnation: int, counts: list[int], *, draining: bool) -> None:
        heartbeat = beat_of(*(Load(num_running=count) for count in counts), incarnation=incarnation, draining=draining)
        is_present = (worker_id, incarnation) in self.present
        if is_present and len(counts) != len(self.model[worker_id].sequences):
            with pytest.raises(RemoteProtocolError):
                self.registry.heartbeat(WorkerId(worker_id), heartbeat, self.now_ns)
            return
        assert self.registry.heartbeat(WorkerId(worker_id), heartbeat, self.now_ns) == is_present
        if is_present:
            max_model_len = self.model[worker_id].max_model_len
            self.model[worker_id] = ModelWorker(incarnation, self.now_ns + NS_PER_S, counts, max_model_len, draining)

    @rule(worker_id=WORKER_IDS, data=st.data(), num_sequences=st.integers(1, 3))
    def dispatch(self, worker_id: str, data: st.DataObject, num_sequences: int) -> None:
        num_ranks = len(self.model[worker_id].sequences) if worker_id in self.model else 1
        dp_rank = data.draw(st.integers(0, num_ranks - 1))
        self.registry.dispatched(WorkerId(worker_id), dp_rank=dp_rank, num_sequences=num_sequences, num_tokens=1)
        if worker_id in self.model:
            self.model[worker_id].sequences[dp_rank] += num_sequences

    @rule(worker_id=WORKER_IDS, incarnation=INCARNATIONS)
    def leave(self, worker_id: str, incarnation: int) -> None:
        changes = self.registry.leave(WorkerId(worker_id), Incarnation(incarnation))
        assert bool(changes) == ((worker_id, incarnation) in self.present)
        self.apply(changes)
        if changes:
            del self.model[worker_id]

    @rule(duration_ns=st.integers(0, 2 * NS_PER_S))
    def pass_time(self, duration_ns: int) -> None:
        self.now_ns += duration_ns
        changes = self.registry.expire(self.now_ns)
        self.apply(changes)
        overdue = {worker_id for worker_id, worker in self.model.items() if worker.deadline_ns <= self.now_ns}
        assert {change.worker.worker_id for change in changes} == overdue
        for worker_id in overdue:
            del self.model[worker_id]

    def apply(self, changes: tuple[Left | Joined, ...]) -> None:
        """Each worker leaves only when present and joins only when absent."""
        for change in changes:
            key = (str(change.worker.worker_id), int(change.worker.incarnation))
            if isinstance(change, Left):
                self.present.remove(key)
            else:
                assert key not in self.present
                self.present.add(key)

    @invariant()
    def view_is_the_model(self) -> None:
        shown = [(worker.worker_id, worker.incarnation) for worker in self.registry.view.workers]
        expected = sorted((worker_id, worker.incarnation) for worker_id, worker in self.model.items())
        assert shown == expected
        assert set(shown) == self.present
        assert (self.registry.fingerprint is None) == (not expected)
        contexts = [worker.max_model_len for worker in self.model.values() if not worker.draining]
        assert self.registry.max_model_len == min(filter(None, contexts), default=None)
        for worker in self.registry.view.workers:
            assert [rank.dp_rank for rank in worker.ranks] == list(range(len(worker.ranks)))
            sequences = [rank.num_sequences for rank in worker.ranks]
            assert sequences == self.model[worker.worker_id].sequences


RegistryMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestRegistryMachine = RegistryMachine.TestCase
