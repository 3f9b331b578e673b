"""The prefill side of a handoff: cancels, failures and loss in every window, and pages held until the close (H3)."""

import pytest
from msgspec.structs import replace
from tests.pure.prefill_side import DECODE, LAYOUT, TAIL_BYTES, PrefillSide

from pdserve.errors import CapacityError, FabricError
from pdserve.fabric.port import PushOutcome
from pdserve.ids import Incarnation
from pdserve.telemetry.instants import Instant
from pdserve.wire.peer import Cancel, GrantRefused, HandoffStopped

OTHER = Incarnation(3)


@pytest.fixture
def side() -> PrefillSide:
    return PrefillSide()


def confirmations(side: PrefillSide) -> list[int]:
    return [message.handoff_id for _, message in side.sent if isinstance(message, HandoffStopped)]


def run_whole(side: PrefillSide) -> None:
    """Compute and push the prompt of 12 tokens: two passes."""
    for _ in range(2):
        side.run_pass()
        side.all_pushes_end()


# Without faults


def test_handoff_is_pushed_whole_and_says_nothing(side: PrefillSide) -> None:
    side.granted()
    run_whole(side)
    assert side.is_whole()
    assert side.sent == []
    assert not side.fabric.flushes


def test_pages_are_kept_after_the_last_pass_until_the_last_push_ended(side: PrefillSide) -> None:
    side.granted()
    side.run_pass()
    side.run_pass()
    num_held = side.num_pages - side.pool.num_free
    assert num_held == 3
    *early, last = side.fabric.armed
    for push_id in early:
        side.push_ends(push_id)
    assert side.pool.num_free == side.num_pages - num_held
    side.push_ends(last)
    assert side.is_whole()


def test_pages_are_kept_while_the_pass_runs_though_every_push_ended(side: PrefillSide) -> None:
    side.granted(num_tokens=5)
    side.start_pass()
    side.all_pushes_end()
    assert side.role.num_open == 1
    assert side.pool.num_free < side.num_pages
    side.end_pass()
    assert side.is_whole()


def test_handoff_that_ended_is_reported_with_its_instants(side: PrefillSide) -> None:
    grant = side.granted()
    run_whole(side)
    ((ended, instants),) = side.role.take_ended()
    assert ended is grant
    assert set(instants.times_ns) == {
        Instant.ADMITTED,
        Instant.PREFILL_STARTED,
        Instant.PREFILL_ENDED,
        Instant.DRAINED,
    }
    assert side.role.take_ended() == []


def test_handoff_stopped_in_the_queue_is_reported_without_a_pass(side: PrefillSide) -> None:
    side.cancelled(side.granted())
    side.flush_ends()
    ((_, instants),) = side.role.take_ended()
    assert set(instants.times_ns) == {Instant.ADMITTED}


@pytest.mark.parametrize("traced", [False, True])
def test_pushes_are_kept_for_the_trace_of_a_traced_handoff_only(side: PrefillSide, traced: bool) -> None:
    side.role.on_grant(DECODE, replace(side.grant(), traced=traced), now_ns=0)
    run_whole(side)
    pushed = side.role.take_pushed()
    page_bytes = LAYOUT.page_bytes
    expected = [(False, page_bytes, 2), (False, 2 * page_bytes, 2), (True, TAIL_BYTES, 1)]
    shown = [(push.is_tail, push.layer_bytes, len(push.layers)) for push in pushed]
    assert shown == (expected if traced else [])


# Refusals


def test_grant_without_a_tail_slot_is_refused_with_a_time_to_come_back() -> None:
    side = PrefillSide(num_tail_slots=1)
    side.granted(1)
    side.granted(2)
    ((_, refusal),) = side.sent
    assert isinstance(refusal, GrantRefused)
    assert (refusal.handoff_id, refusal.retry_after_s > 0) == (2, True)
    assert side.role.num_refused == 1
    run_whole(side)
    assert side.is_whole()


def test_grant_to_a_full_queue_is_refused_and_gives_its_tail_slot_back() -> None:
    side = PrefillSide(num_tail_slots=2, max_waiting=1)
    side.granted(1)
    side.granted(2)
    side.run_pass()
    side.granted(3)
    refused = [message.handoff_id for _, message in side.sent if isinstance(message, GrantRefused)]
    assert refused == [2]


def test_grant_longer_than_the_pool_is_refused() -> None:
    side = PrefillSide(num_pages=2)
    side.granted(num_tokens=12)
    ((_, refusal),) = side.sent
    assert isinstance(refusal, GrantRefused)
    assert side.is_whole()


def test_refused_grant_may_be_granted_anew(side: PrefillSide) -> None:
    for handoff_id in range(1, 6):
        side.granted(handoff_id)
    assert side.role.num_refused == 1
    assert side.role.num_open == side.sender.num_open == 4


# Cancels


def test_cancel_while_queued_is_confirmed_after_a_flush(side: PrefillSide) -> None:
    grant = side.granted()
    side.cancelled(grant)
    assert confirmations(side) == []
    side.flush_ends()
    assert confirmations(side) == [grant.handoff_id]
    assert side.is_whole()
    assert side.scheduler.next_batch(0) is None


def test_cancel_while_pushing_keeps_pages_until_the_last_push_ended(side: PrefillSide) -> None:
    grant = side.granted()
    side.run_pass()
    side.cancelled(grant)
    assert side.fabric.cancelled == list(side.fabric.armed)
    assert not side.fabric.flushes
    assert side.pool.num_free < side.num_pages
    side.all_pushes_end(PushOutcome.CANCELLED)
    side.flush_ends()
    assert confirmations(side) == [grant.handoff_id]
    assert side.is_whole()


def test_cancel_during_a_pass_waits_for_the_end_of_the_pass(side: PrefillSide) -> None:
    grant = side.granted()
    side.start_pass()
    side.cancelled(grant)
    side.all_pushes_end(PushOutcome.CANCELLED)
    assert not side.fabric.flushes
    side.end_pass()
    side.flush_ends()
    assert confirmations(side) == [grant.handoff_id]
    assert side.is_whole()


def test_cancel_during_the_last_pass_waits_for_the_end_of_the_pass(side: PrefillSide) -> None:
    grant = side.granted()
    side.run_pass()
    side.start_pass()
    side.cancelled(grant)
    side.all_pushes_end(PushOutcome.DONE)
    assert not side.fabric.flushes
    side.end_pass()
    side.flush_ends()
    assert confirmations(side) == [grant.handoff_id]
    assert side.is_whole()


def test_cancel_when_sealed_drains_and_is_confirmed(side: PrefillSide) -> None:
    grant = side.granted()
    side.run_pass()
    side.run_pass()
    side.cancelled(grant)
    side.all_pushes_end()
    side.flush_ends()
    assert confirmations(side) == [grant.handoff_id]
    assert side.is_whole()


def test_cancel_after_the_close_is_confirmed_after_a_flush(side: PrefillSide) -> None:
    grant = side.granted()
    run_whole(side)
    side.cancelled(grant)
    assert confirmations(side) == []
    side.flush_ends()
    assert confirmations(side) == [grant.handoff_id]


def test_cancel_twice_is_confirmed_once(side: PrefillSide) -> None:
    grant = side.granted()
    side.run_pass()
    side.cancelled(grant)
    side.cancelled(grant)
    side.all_pushes_end(PushOutcome.CANCELLED)
    side.cancelled(grant)
    side.flush_ends()
    assert confirmations(side) == [grant.handoff_id]


def test_cancel_of_one_handoff_leaves_the_other_in_the_pass(side: PrefillSide) -> None:
    first, second = side.granted(1, num_tokens=4), side.granted(2, num_tokens=5)
    side.start_pass()
    side.cancelled(first)
    side.end_pass()
    side.all_pushes_end()
    side.flush_ends()
    assert confirmations(side) == [first.handoff_id]
    side.run_pass()
    side.all_pushes_end()
    assert side.is_whole()
    assert second.handoff_id not in confirmations(side)


# Failures


def test_failed_push_stops_the_handoff_and_says_so_after_a_flush(side: PrefillSide) -> None:
    grant = side.granted()
    side.run_pass()
    side.all_pushes_end(PushOutcome.FAILED)
    assert confirmations(side) == []
    side.flush_ends()
    assert confirmations(side) == [grant.handoff_id]
    ((_, stopped),) = side.sent
    assert isinstance(stopped, HandoffStopped)
    assert stopped.message == "a write failed with errno 5"
    assert side.is_whole()


def test_failed_push_of_several_waits_for_the_others(side: PrefillSide) -> None:
    side.granted()
    side.run_pass()
    side.run_pass()
    first, *others = side.fabric.armed
    side.push_ends(first, PushOutcome.FAILED)
    assert side.fabric.cancelled == others
    assert not side.fabric.flushes
    side.all_pushes_end(PushOutcome.CANCELLED)
    side.flush_ends()
    assert side.is_whole()


def test_failed_push_during_a_pass_waits_for_the_end_of_the_pass(side: PrefillSide) -> None:
    side.granted()
    side.start_pass()
    side.all_pushes_end(PushOutcome.FAILED)
    assert not side.fabric.flushes
    side.end_pass()
    side.flush_ends()
    assert side.is_whole()


def test_failed_flush_drops_the_peer_instead_of_confirming(side: PrefillSide) -> None:
    grant = side.granted()
    side.cancelled(grant)
    side.flush_ends(delivered=False)
    assert side.dropped == [DECODE]
    assert confirmations(side) == []
    assert side.is_whole()


@pytest.mark.parametrize(
    "error",
    [FabricError("outside the region", operation="arm"), CapacityError("too much is armed", retry_after_s=1.0)],
)
def test_failed_arm_stops_the_handoff_with_its_reason(side: PrefillSide, error: FabricError | CapacityError) -> None:
    grant = side.granted()
    side.fabric.arm_error = error
    side.run_pass()
    side.flush_ends()
    ((_, stopped),) = side.sent
    assert isinstance(stopped, HandoffStopped)
    assert (stopped.handoff_id, stopped.message) == (grant.handoff_id, error.message)
    assert side.is_whole()


# Loss of the peer


def test_lost_peer_while_queued_frees_everything_at_once(side: PrefillSide) -> None:
    side.granted()
    side.lose()
    assert side.is_whole()
    assert len(side.fabric.disconnected) == 1


def test_lost_peer_while_pushing_keeps_pages_until_the_last_push_ended(side: PrefillSide) -> None:
    side.granted()
    side.run_pass()
    side.lose()
    side.lose()
    assert side.fabric.cancelled == list(side.fabric.armed)
    assert side.pool.num_free < side.num_pages
    side.all_pushes_end(PushOutcome.FAILED)
    assert side.is_whole()
    assert side.sent == []


def test_lost_peer_during_a_pass_waits_for_its_end(side: PrefillSide) -> None:
    side.granted()
    side.start_pass()
    side.lose()
    side.all_pushes_end(PushOutcome.CANCELLED)
    assert side.pool.num_free < side.num_pages
    side.end_pass()
    assert side.is_whole()


def test_lost_peer_when_sealed_drains_without_a_flush(side: PrefillSide) -> None:
    side.granted()
    side.run_pass()
    side.run_pass()
    side.lose()
    side.all_pushes_end(PushOutcome.FAILED)
    assert side.is_whole()
    assert not side.fabric.flushes


def test_lost_peer_while_stopping_during_a_pass_is_withdrawn_once(side: PrefillSide) -> None:
    grant = side.granted()
    side.start_pass()
    side.cancelled(grant)
    side.lose()
    side.all_pushes_end(PushOutcome.CANCELLED)
    side.end_pass()
    assert side.is_whole()


def test_lost_peer_while_flushing_closes_without_a_confirmation(side: PrefillSide) -> None:
    grant = side.granted()
    side.cancelled(grant)
    side.lose()
    assert side.is_whole()
    side.flush_ends(delivered=False)
    assert side.sent == []
    assert side.dropped == []


def test_loss_of_one_peer_leaves_the_handoffs_of_another_alone(side: PrefillSide) -> None:
    """H10."""
    side.join(OTHER)
    side.granted(1)
    side.granted(1, peer=OTHER)  # the same number from another decode worker is another handoff
    side.lose(DECODE)
    assert side.role.num_open == 1
    run_whole(side)
    assert side.is_whole()


def test_cancel_from_a_lost_peer_is_stale(side: PrefillSide) -> None:
    grant = side.granted()
    side.lose()
    side.role.on_cancel(DECODE, Cancel(sender=DECODE, receiver=grant.receiver, handoff_id=grant.handoff_id), now_ns=0)
    assert side.sender.num_stale_messages == 1
    assert not side.fabric.flushes
