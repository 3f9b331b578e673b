"""A worker of several data parallel ranks: each request stays on its rank, and no rank waits for another."""

import pytest
from tests.pure.decode_side import DECODE, PREFILL
from tests.pure.worker_side import WorkerSide

from pdserve.config.role import Role
from pdserve.errors import InternalError
from pdserve.fabric.port import ExpectationExpired
from pdserve.ids import RequestId
from pdserve.units import NS_PER_S
from pdserve.wire.cluster import Failed, FailureKind, Generated, PrefillPlace
from pdserve.wire.peer import Cancel, HandoffStopped


@pytest.fixture
def worker() -> WorkerSide:
    return WorkerSide()


def texts(worker: WorkerSide) -> dict[str, str]:
    """What the gateway was told since the last call."""
    told: dict[str, str] = {}
    for message in worker.core.take_messages():
        assert isinstance(message, Generated)
        for delta in message.deltas:
            told[delta.request_id] = told.get(delta.request_id, "") + delta.text
    return told


def failures(worker: WorkerSide) -> dict[str, FailureKind]:
    return {message.request_id: message.kind for message in worker.core.take_messages() if isinstance(message, Failed)}


# Which rank


@pytest.mark.parametrize(
    ("role", "num_dp_ranks", "dp_rank"),
    [(Role.DECODE, 2, 2), (Role.DECODE, 2, -1), (Role.BOTH, 1, 1), (Role.PREFILL, 1, 0)],
)
def test_generate_for_a_rank_that_does_not_exist_is_refused_and_takes_nothing(
    role: Role, num_dp_ranks: int, dp_rank: int
) -> None:
    worker = WorkerSide(role=role, num_dp_ranks=num_dp_ranks)
    (refusal,) = worker.generate("lost", dp_rank=dp_rank)
    assert isinstance(refusal, Failed)
    assert (refusal.sender, refusal.request_id, refusal.kind) == (DECODE, "lost", FailureKind.INTERNAL)
    assert refusal.message == f"worker worker has no decoding rank {dp_rank}"
    assert all(worker.is_idle(index) for index in range(num_dp_ranks))
    assert worker.sent == []


@pytest.mark.parametrize("dp_rank", [0, 1])
def test_request_is_handed_over_to_and_decoded_on_the_rank_it_names(worker: WorkerSide, dp_rank: int) -> None:
    assert worker.generate("request", dp_rank=dp_rank) == []
    (grant,) = worker.grants()
    assert grant.dp_rank == dp_rank
    worker.lands(grant)
    assert worker.prefilled == [(dp_rank, "request")]
    assert worker.is_idle(1 - dp_rank)
    for letter in "abcd":
        worker.run_pass(dp_rank, letter)
    assert texts(worker) == {"request": "abcd"}
    assert worker.is_idle(dp_rank)
    assert [request.request_id for request in worker.core.take_ended()] == ["request"]


def test_sequences_of_two_ranks_that_share_a_number_do_not_mix(worker: WorkerSide) -> None:
    for dp_rank, name in enumerate(["first", "second"]):
        worker.generate(name, dp_rank=dp_rank, is_remote=False)
    assert worker.run_pass(0, "a") == worker.run_pass(1, "b") == [0]
    assert texts(worker) == {"first": "a", "second": "b"}
    for letter in "xyz":
        worker.run_pass(1, letter)
    assert texts(worker) == {"second": "xyz"}
    assert worker.is_idle(1)
    assert worker.core.ranks[0].scheduler.num_running == 1


# Fairness


@pytest.mark.parametrize("full", [0, 1])
def test_rank_without_pages_does_not_stop_the_other(worker: WorkerSide, full: int) -> None:
    other = 1 - full
    worker.generate("big", dp_rank=full, num_tokens=50)
    worker.generate("waits", dp_rank=full, num_tokens=50)
    worker.generate("goes", dp_rank=other, num_tokens=50)
    assert [(grant.request_id, grant.dp_rank) for grant in worker.grants()] == [("big", full), ("goes", other)]
    loads = worker.core.loads()
    assert (loads[full].num_waiting, loads[full].num_waiting_tokens) == (1, 50)
    assert (loads[other].num_waiting, loads[other].num_waiting_tokens) == (0, 0)
    worker.lands(worker.grants()[1])
    worker.run_pass(other, "a")
    assert texts(worker) == {"goes": "a"}


def test_request_starts_when_its_own_rank_has_room_and_not_before(worker: WorkerSide) -> None:
    for name in ("first", "second"):
        worker.generate(name, dp_rank=0, num_tokens=50)
    worker.generate("other", dp_rank=1, num_tokens=50)
    worker.core.on_abort(RequestId("other"), now_ns=0)
    stop(worker, 1)
    assert [grant.request_id for grant in worker.grants()] == ["first", "other"]
    worker.core.on_abort(RequestId("first"), now_ns=0)
    stop(worker, 0)
    assert [grant.request_id for grant in worker.grants()] == ["first", "other", "second"]


def stop(worker: WorkerSide, grant_index: int) -> None:
    """The prefill worker confirms a cancel."""
    grant, receiver = worker.grants()[grant_index], worker.core.receiver
    assert receiver is not None
    message = HandoffStopped(sender=PREFILL, receiver=DECODE, handoff_id=grant.handoff_id, message="cancelled")
    receiver.on_message(PREFILL, message, now_ns=0)
    worker.core.advance(now_ns=0)


def test_quarantine_is_shown_and_felt_on_its_own_rank(worker: WorkerSide) -> None:
    worker.generate("aborted", dp_rank=1, num_tokens=37)  # 9 of 16 pages
    worker.core.on_abort(RequestId("aborted"), now_ns=0)
    assert [load.num_quarantined_pages for load in worker.core.loads()] == [0, 9]
    worker.generate("local", dp_rank=1)
    worker.generate("remote", dp_rank=0)
    assert [grant.request_id for grant in worker.grants()] == ["aborted", "remote"]


# What concerns all ranks


def test_lost_prefill_worker_leads_to_local_prefill_on_every_rank(worker: WorkerSide) -> None:
    for dp_rank in (0, 1):
        worker.generate(f"request-{dp_rank}", dp_rank=dp_rank)
    worker.core.peer_lost(PREFILL, now_ns=0)
    places: dict[str, PrefillPlace | None] = {}
    for dp_rank in (0, 1):
        worker.run_pass(dp_rank, "a")
    for message in worker.core.take_messages():
        assert isinstance(message, Generated)
        places |= {delta.request_id: delta.prefill for delta in message.deltas}
    assert places == {"request-0": PrefillPlace.LOCAL, "request-1": PrefillPlace.LOCAL}
    assert worker.prefilled == [(0, "request-0"), (1, "request-1")]
    assert worker.core.num_prefill_peers == 0


def test_expired_handoff_is_taken_up_on_its_own_rank(worker: WorkerSide) -> None:
    for dp_rank in (0, 1):
        worker.generate(f"request-{dp_rank}", dp_rank=dp_rank)
    late = worker.grants()[1]
    expired = ExpectationExpired(immediate=late.immediate, num_arrived=1, num_expected=5)
    worker.core.on_fabric_events([expired], now_ns=0)
    assert [message.handoff_id for message in worker.sent if isinstance(message, Cancel)] == [late.handoff_id]
    worker.run_pass(1, "a")
    assert texts(worker) == {"request-1": "a"}
    assert worker.core.ranks[0].scheduler.num_running == 0


def test_deadline_passes_on_every_rank(worker: WorkerSide) -> None:
    worker.generate("first", dp_rank=0)
    worker.generate("second", dp_rank=1, is_remote=False)
    worker.core.on_time(30 * NS_PER_S)
    assert failures(worker) == {"first": FailureKind.TIMEOUT, "second": FailureKind.TIMEOUT}


def test_worker_that_stops_fails_the_requests_of_every_rank(worker: WorkerSide) -> None:
    worker.generate("first", dp_rank=0)
    worker.generate("second", dp_rank=1, is_remote=False)
    worker.core.fail_all(FailureKind.SHUTTING_DOWN, "the worker stops", now_ns=0)
    assert failures(worker) == {"first": FailureKind.SHUTTING_DOWN, "second": FailureKind.SHUTTING_DOWN}
    assert worker.is_idle(1)


def test_lost_gateway_aborts_the_requests_of_every_rank_silently(worker: WorkerSide) -> None:
    worker.generate("first", dp_rank=0, is_remote=False)
    worker.generate("second", dp_rank=1, is_remote=False)
    worker.core.abort_all(now_ns=0)
    assert worker.core.take_messages() == []
    assert worker.is_idle(0) and worker.is_idle(1)
    assert len(worker.core.take_ended()) == 2


def test_prefill_worker_of_several_data_parallel_ranks_is_a_bug() -> None:
    with pytest.raises(InternalError, match="a prefill worker has one rank, not 2"):
        WorkerSide(role=Role.PREFILL, num_dp_ranks=2)
