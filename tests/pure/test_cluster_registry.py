"""The registry: each refusal, each way to leave, and a state machine against a slow obvious model."""

from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pdserve.cluster import registry as registry_module
from pdserve.cluster.registry import MAX_LEASE_S, Joined, LeaveReason, Left, Refused, Registry
from pdserve.config.role import Role
from pdserve.ids import Incarnation, WorkerId
from pdserve.units import NS_PER_S
from pdserve.wire.cluster import Join, Load
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
        load=Load(),
    )
    return msgspec.structs.replace(join, **changed)


def new_registry(max_workers: int = 4) -> Registry:
    return Registry(model_name="smol", max_workers=max_workers)


def joined(registry: Registry, join: Join, now_ns: int = 0) -> tuple[Left | Joined, ...]:
    changes = registry.join(join, now_ns)
    assert not isinstance(changes, Refused), changes
    return changes


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
    assert not registry.heartbeat(WorkerId("d0"), Incarnation(1), FULL_LOAD, 6)
    assert registry.leave(WorkerId("d0"), Incarnation(1)) == ()
    assert isinstance(registry.join(join_of(incarnation=Incarnation(1)), 7), Refused)
    assert registry.view.workers[0].load == Load()


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
    assert registry.heartbeat(WorkerId("d0"), Incarnation(1), FULL_LOAD, NS_PER_S // 2)
    assert registry.expire(NS_PER_S) == ()
    (left,) = registry.expire(3 * NS_PER_S // 2)
    assert left.reason is LeaveReason.EXPIRED
    assert registry.view.workers == ()
    joined(registry, join_of())


def test_registry_dispatched_counts_until_the_next_heartbeat() -> None:
    registry = new_registry()
    joined(registry, join_of(load=FULL_LOAD))
    registry.dispatched(WorkerId("d0"), num_sequences=1, num_tokens=100)
    registry.dispatched(WorkerId("d0"), num_sequences=1, num_tokens=50)
    (worker,) = registry.view.workers
    assert (worker.num_sequences, worker.num_waiting_tokens) == (7, 650)
    registry.heartbeat(WorkerId("d0"), Incarnation(1), FULL_LOAD, 1)
    (worker,) = registry.view.workers
    assert (worker.num_sequences, worker.num_waiting_tokens) == (5, 500)
    registry.dispatched(WorkerId("nobody"), num_sequences=1, num_tokens=1)


def test_registry_superseded_incarnations_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_module, "MAX_SUPERSEDED", 2)
    registry = new_registry()
    for incarnation in range(1, 6):
        joined(registry, join_of(incarnation=Incarnation(incarnation)))
    assert isinstance(registry.join(join_of(incarnation=Incarnation(4)), 0), Refused)
    assert isinstance(registry.join(join_of(incarnation=Incarnation(3)), 0), Refused)
    joined(registry, join_of(incarnation=Incarnation(1)))


@dataclass
class ModelWorker:
    incarnation: int
    deadline_ns: int


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

    @rule(worker_id=WORKER_IDS, incarnation=INCARNATIONS)
    def join(self, worker_id: str, incarnation: int) -> None:
        changes = self.registry.join(join_of(worker_id, incarnation=Incarnation(incarnation)), self.now_ns)
        room = worker_id in self.model or len(self.model) < 2
        assert isinstance(changes, Refused) == ((worker_id, incarnation) in self.superseded or not room)
        if isinstance(changes, Refused):
            return
        self.apply(changes)
        if worker_id in self.model and self.model[worker_id].incarnation != incarnation:
            self.superseded.add((worker_id, self.model[worker_id].incarnation))
        self.model[worker_id] = ModelWorker(incarnation, self.now_ns + NS_PER_S)

    @rule(worker_id=WORKER_IDS, incarnation=INCARNATIONS)
    def heartbeat(self, worker_id: str, incarnation: int) -> None:
        renewed = self.registry.heartbeat(WorkerId(worker_id), Incarnation(incarnation), Load(), self.now_ns)
        assert renewed == ((worker_id, incarnation) in self.present)
        if renewed:
            self.model[worker_id].deadline_ns = self.now_ns + NS_PER_S

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


RegistryMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestRegistryMachine = RegistryMachine.TestCase
