"""The decode role: a handoff that failed is asked of another prefill worker, once."""

import pytest
from tests.pure.decode_role_side import DecodeRoleSide
from tests.pure.decode_side import PREFILL

from pdserve.decode.request import HandoffOutcome, LocalReason
from pdserve.ids import Incarnation
from pdserve.wire.cluster import PrefillPlace
from pdserve.wire.peer import Grant

OTHER = Incarnation(3)


@pytest.fixture
def worker() -> DecodeRoleSide:
    worker = DecodeRoleSide()
    worker.side.join(OTHER)
    return worker


@pytest.mark.parametrize("how", ["stopped", "refused", "expired", "lost"])
def test_failed_handoff_is_asked_of_another_prefill_worker_with_other_pages(worker: DecodeRoleSide, how: str) -> None:
    request_id = worker.generate()
    (first,) = worker.grants()
    fail_handoff(worker, first, how)
    _, second = worker.grants()
    assert (first.receiver, second.receiver) == (PREFILL, OTHER)
    assert first.token_ids == second.token_ids
    assert first.immediate != second.immediate
    if how in ("expired", "lost"):  # it may still write
        assert not set(first.page_indices) & set(second.page_indices)
    worker.land(second)
    worker.sample("abcd")
    assert worker.places == {request_id: PrefillPlace.REMOTE}
    (request,) = worker.role.take_ended()
    assert (request.local_reason, request.handoff_outcome) == (None, HandoffOutcome.LANDED)
    if how == "lost":
        worker.side.is_fenced(PREFILL)
    elif how == "expired":
        worker.side.stopped(first)
    assert worker.is_idle()


@pytest.mark.parametrize(
    ("how", "reason", "outcome"),
    [
        ("stopped", LocalReason.HANDOFF_FAILED, HandoffOutcome.FAILED),
        ("refused", LocalReason.REFUSED, HandoffOutcome.REFUSED),
    ],
)
def test_handoff_that_fails_twice_leads_to_local_prefill(
    worker: DecodeRoleSide, how: str, reason: LocalReason, outcome: HandoffOutcome
) -> None:
    worker.side.join(Incarnation(4))
    worker.generate()
    for _ in range(2):
        fail_handoff(worker, worker.grants()[-1], how)
    assert len(worker.grants()) == 2
    worker.sample("abcd")
    (request,) = worker.role.take_ended()
    assert (request.local_reason, request.handoff_outcome) == (reason, outcome)
    assert worker.is_idle()


def test_failed_handoff_is_asked_of_the_peer_with_the_fewest_handoffs(worker: DecodeRoleSide) -> None:
    worker.side.join(Incarnation(4))
    worker.side.open(peer=OTHER)
    worker.generate()
    fail_handoff(worker, worker.grants()[-1], "stopped")
    assert worker.grants()[-1].receiver == 4


def test_failed_handoff_is_not_asked_of_a_peer_that_is_lost_too(worker: DecodeRoleSide) -> None:
    worker.generate()
    worker.side.receiver.peer_lost(OTHER)
    fail_handoff(worker, worker.grants()[0], "stopped")
    assert len(worker.grants()) == 1
    worker.sample("abcd")
    (request,) = worker.role.take_ended()
    assert request.local_reason is LocalReason.HANDOFF_FAILED


def test_abort_amid_a_second_handoff_cancels_that_one(worker: DecodeRoleSide) -> None:
    request_id = worker.generate()
    fail_handoff(worker, worker.grants()[0], "stopped")
    second = worker.grants()[1]
    worker.role.on_abort(request_id, now_ns=0)
    assert worker.side.cancels() == [second.handoff_id]
    worker.side.stopped(second)
    (request,) = worker.role.take_ended()
    assert request.handoff_outcome is HandoffOutcome.CANCELLED
    assert worker.is_idle()


def fail_handoff(worker: DecodeRoleSide, grant: Grant, how: str) -> None:
    match how:
        case "stopped":
            worker.side.stopped(grant)
        case "refused":
            worker.side.refused(grant)
        case "expired":
            worker.side.expires(grant)
        case _:
            worker.side.receiver.peer_lost(grant.receiver)
    worker.advance()
