"""The decode side of handoffs, one behaviour at a time; every event is scripted."""

import pytest
from tests.pure.decode_side import DECODE, LAYOUT, PREFILL, DecodeSide

from pdserve.errors import CapacityError, HandoffError, HandoffTimeout, InternalError, PeerLost
from pdserve.fabric.port import Fenced, Landed
from pdserve.ids import HandoffId, Incarnation
from pdserve.transfer.destination import exposures_of
from pdserve.transfer.limits import ReceiverLimits
from pdserve.transfer.outcome import HandoffFailed, HandoffLanded
from pdserve.units import NS_PER_S
from pdserve.wire.peer import HandoffStopped

OTHER = Incarnation(3)


@pytest.fixture
def side() -> DecodeSide:
    return DecodeSide()


def only_failure(side: DecodeSide) -> HandoffFailed:
    (outcome,) = side.receiver.take_outcomes()
    assert isinstance(outcome, HandoffFailed)
    return outcome


# Opening


def test_open_expects_every_page_in_every_layer_and_the_tail(side: DecodeSide) -> None:
    grant = side.open(num_tokens=10, now_ns=7)
    expectation = side.fabric.expected[grant.immediate]
    assert len(grant.page_indices) == 3
    assert expectation.num_writes == 3 * LAYOUT.num_layers + 1
    assert expectation.deadline_ns == 7 + 30 * NS_PER_S


def test_open_leaves_the_page_of_the_last_token_to_decoding(side: DecodeSide) -> None:
    assert len(side.open(num_tokens=9).page_indices) == 2


def test_open_without_pages_changes_nothing(side: DecodeSide) -> None:
    num_sent = len(side.sent)
    with pytest.raises(CapacityError, match="17 pages wanted"):
        side.open(num_tokens=4 * 17)
    assert side.is_whole()
    assert len(side.sent) == num_sent
    assert [side.open().tail_slot for _ in range(4)] == [1, 2, 3, 0]  # slot 0 was taken, and went to the end


def test_open_without_tail_slots_changes_nothing(side: DecodeSide) -> None:
    for _ in range(4):
        side.open()
    num_free = side.pool.num_free
    with pytest.raises(CapacityError, match="tail slots are in use"):
        side.open()
    assert side.pool.num_free == num_free
    assert side.receiver.num_open == 4


def test_handoffs_that_are_open_share_nothing(side: DecodeSide) -> None:
    grants = [side.open() for _ in range(4)]
    pages = [page for grant in grants for page in grant.page_indices]
    assert len(set(pages)) == len(pages)
    assert len({grant.immediate for grant in grants}) == 4
    assert len({grant.tail_slot for grant in grants}) == 4
    assert len({grant.handoff_id for grant in grants}) == 4


# Landing


def test_landed_hands_the_pages_to_the_caller(side: DecodeSide) -> None:
    grant = side.open()
    side.all_land(grant)
    (outcome,) = side.receiver.take_outcomes()
    assert isinstance(outcome, HandoffLanded)
    assert tuple(outcome.page_indices) == grant.page_indices
    assert side.pool.num_free == side.num_pages - len(grant.page_indices)
    assert side.receiver.num_open == 0


def test_landed_tail_slot_is_the_callers_until_it_gives_it_back(side: DecodeSide) -> None:
    grants = [side.open() for _ in range(side.num_tail_slots)]
    side.all_land(grants[1])
    (outcome,) = side.receiver.take_outcomes()
    assert isinstance(outcome, HandoffLanded)
    assert outcome.tail_slot == grants[1].tail_slot
    with pytest.raises(CapacityError, match="tail slots are in use"):
        side.open()
    side.receiver.release_tail_slot(0, outcome.tail_slot)
    assert side.open().tail_slot == grants[1].tail_slot


def test_landed_immediate_is_forgotten_before_its_slot_is_used_again() -> None:
    side = DecodeSide(limits=ReceiverLimits(max_handoffs=1))
    first = side.open()
    side.all_land(first)
    assert side.fabric.forgotten == [first.immediate]
    second = side.open()
    assert second.immediate == first.immediate + 1  # same slot, next generation
    late = Landed(immediate=first.immediate, num_writes=5, first_ns=0, last_ns=0, arrivals_ns=())
    side.receiver.take_outcomes()
    side.receiver.on_fabric_event(late, now_ns=0)
    assert side.receiver.take_outcomes() == []
    assert side.receiver.num_open == 1


def test_landed_after_a_cancel_releases_the_pages(side: DecodeSide) -> None:
    grant = side.open()
    side.cancel(grant.handoff_id)
    side.all_land(grant)
    assert side.receiver.take_outcomes() == []
    assert side.is_whole()


def test_landed_after_the_peer_was_lost_releases_the_pages_once(side: DecodeSide) -> None:
    grant = side.open()
    side.receiver.peer_lost(PREFILL)
    side.all_land(grant)
    assert isinstance(only_failure(side).error, PeerLost)
    assert side.is_whole()
    side.is_fenced(PREFILL)
    assert side.is_whole()


# Refusals, confirmations, cancels


def test_refused_grant_frees_the_pages_and_says_when_to_come_back(side: DecodeSide) -> None:
    grant = side.open()
    side.refused(grant)
    error = only_failure(side).error
    assert isinstance(error, CapacityError)
    assert error.retry_after_s == 2.0
    assert side.is_whole()


def test_refusal_that_crosses_a_cancel_frees_the_pages(side: DecodeSide) -> None:
    grant = side.open()
    side.cancel(grant.handoff_id)
    side.refused(grant)
    assert side.is_whole()
    assert side.receiver.take_outcomes() == []


def test_stopped_unasked_fails_the_handoff_and_frees_the_pages(side: DecodeSide) -> None:
    grant = side.open()
    side.stopped(grant, now_ns=NS_PER_S)
    error = only_failure(side).error
    assert isinstance(error, HandoffError)
    assert "after 1.000 s: cancelled" in error.message
    assert side.is_whole()


def test_cancel_keeps_the_pages_until_the_peer_confirms(side: DecodeSide) -> None:
    grant = side.open()
    side.cancel(grant.handoff_id)
    assert side.cancels() == [grant.handoff_id]
    assert side.receiver.num_quarantined_pages() == len(grant.page_indices)
    assert side.pool.num_free == side.num_pages - len(grant.page_indices)
    side.stopped(grant)
    assert side.is_whole()
    assert side.receiver.num_quarantined_pages() == 0
    assert side.receiver.take_outcomes() == []


def test_cancel_twice_is_sent_once(side: DecodeSide) -> None:
    grant = side.open()
    side.cancel(grant.handoff_id)
    side.cancel(grant.handoff_id)
    assert side.cancels() == [grant.handoff_id]


def test_cancel_of_a_closed_handoff_is_not_sent(side: DecodeSide) -> None:
    grant = side.open()
    side.all_land(grant)
    side.cancel(grant.handoff_id)
    assert side.cancels() == []


def test_expired_handoff_fails_and_is_cancelled(side: DecodeSide) -> None:
    grant = side.open()
    side.expires(grant, num_arrived=3)
    error = only_failure(side).error
    assert isinstance(error, HandoffTimeout)
    assert "3 of 5 writes arrived" in error.message
    assert side.cancels() == [grant.handoff_id]
    assert not side.is_whole()
    side.stopped(grant)
    assert side.is_whole()


def test_expiry_after_a_cancel_changes_nothing(side: DecodeSide) -> None:
    grant = side.open()
    side.cancel(grant.handoff_id)
    side.expires(grant)
    assert side.cancels() == [grant.handoff_id]
    assert side.receiver.take_outcomes() == []


def test_unresponsive_peer_is_dropped_once_after_the_cancel_timeout(side: DecodeSide) -> None:
    grant = side.open()
    side.cancel(grant.handoff_id, now_ns=5)
    side.receiver.on_time(5 + 10 * NS_PER_S - 1)
    assert side.dropped == []
    side.receiver.on_time(5 + 10 * NS_PER_S)
    side.receiver.on_time(5 + 20 * NS_PER_S)
    assert side.dropped == [PREFILL]
    assert not side.is_whole()
    side.receiver.peer_lost(PREFILL)
    side.is_fenced(PREFILL)
    assert side.is_whole()


def test_confirmed_cancel_in_time_drops_nobody(side: DecodeSide) -> None:
    grant = side.open()
    side.cancel(grant.handoff_id)
    side.stopped(grant)
    side.receiver.on_time(100 * NS_PER_S)
    assert side.dropped == []


# Loss and fence


def test_lost_peer_fails_its_handoffs_at_once_and_keeps_their_pages_until_the_last_fence(side: DecodeSide) -> None:
    grants = [side.open(), side.open()]
    side.receiver.peer_lost(PREFILL)
    failed = [outcome.handoff_id for outcome in side.receiver.take_outcomes() if isinstance(outcome, HandoffFailed)]
    assert failed == [grant.handoff_id for grant in grants]
    *early, last = side.exposures(PREFILL)
    assert side.fabric.fenced == [*early, last]
    for exposure in early:
        side.receiver.on_fabric_event(Fenced(exposure=exposure), now_ns=0)
    assert side.receiver.num_open == 2
    assert side.receiver.num_quarantined_pages() == 4
    side.receiver.on_fabric_event(Fenced(exposure=last), now_ns=0)
    assert side.is_whole()


def test_lost_peer_twice_is_fenced_once(side: DecodeSide) -> None:
    side.receiver.peer_lost(PREFILL)
    side.receiver.peer_lost(PREFILL)
    assert len(side.fabric.fenced) == 2
    assert side.receiver.num_peers == 0


def test_loss_of_one_peer_leaves_the_handoffs_of_another_alone(side: DecodeSide) -> None:
    """H10."""
    side.join(OTHER)
    side.open(peer=PREFILL)
    kept = side.open(peer=OTHER)
    side.receiver.peer_lost(PREFILL)
    side.is_fenced(PREFILL)
    assert only_failure(side).handoff_id != kept.handoff_id
    assert side.receiver.num_open == 1
    assert side.receiver.is_connected(OTHER)
    assert side.receiver.num_peers == 1
    side.all_land(kept)
    assert isinstance(side.receiver.take_outcomes()[0], HandoffLanded)


def test_lost_peer_may_join_again_only_after_its_fence(side: DecodeSide) -> None:
    side.receiver.peer_lost(PREFILL)
    assert not side.receiver.is_connected(PREFILL)
    assert not side.receiver.can_join(PREFILL)
    with pytest.raises(InternalError, match="before its last session was fenced"):
        side.join(PREFILL)


def test_lost_peer_after_its_fence_joins_with_new_keys(side: DecodeSide) -> None:
    old = side.exposures(PREFILL)
    side.receiver.peer_lost(PREFILL)
    side.is_fenced(PREFILL)
    side.join(PREFILL)
    assert not set(side.exposures(PREFILL)) & set(old)
    assert side.receiver.is_connected(PREFILL)


def test_withdrawn_exposures_are_fenced(side: DecodeSide) -> None:
    regions = side.receiver.expose()
    side.receiver.withdraw(regions)
    exposures = exposures_of(regions)
    assert side.fabric.fenced == exposures
    side.receiver.on_fabric_event(Fenced(exposure=exposures[0]), now_ns=0)
    assert side.receiver.is_connected(PREFILL)


def test_quarantine_over_its_bound_stops_new_handoffs_until_it_shrinks(side: DecodeSide) -> None:
    grants = [side.open(num_tokens=13) for _ in range(3)]  # 3 pages each of 16
    for grant in grants[:2]:
        side.cancel(grant.handoff_id)
    assert side.receiver.accepts_handoffs()  # 6 of 16
    side.cancel(grants[2].handoff_id)
    assert not side.receiver.accepts_handoffs()  # 9 of 16
    side.stopped(grants[0])
    assert side.receiver.accepts_handoffs()


# Messages of others (H4)


def stale_messages(grant_receiver: Incarnation, handoff_id: HandoffId) -> list[tuple[Incarnation, HandoffStopped]]:
    """(connection, message): wrong sender, wrong receiver, unknown connection, and another peer's handoff."""

    def stopped(sender: Incarnation, receiver: Incarnation) -> HandoffStopped:
        return HandoffStopped(sender=sender, receiver=receiver, handoff_id=handoff_id, message="")

    return [
        (grant_receiver, stopped(OTHER, DECODE)),
        (grant_receiver, stopped(grant_receiver, Incarnation(99))),
        (Incarnation(98), stopped(Incarnation(98), DECODE)),
        (OTHER, stopped(OTHER, DECODE)),
    ]


@pytest.mark.parametrize("case", range(4))
def test_message_of_another_incarnation_is_counted_and_dropped(side: DecodeSide, case: int) -> None:
    side.join(OTHER)
    grant = side.open()
    peer, message = stale_messages(PREFILL, grant.handoff_id)[case]
    side.receiver.on_message(peer, message, now_ns=0)
    assert side.receiver.num_stale_messages == 1
    assert side.receiver.num_open == 1
    assert side.receiver.take_outcomes() == []


def test_message_of_a_lost_peer_does_not_free_its_pages(side: DecodeSide) -> None:
    grant = side.open()
    side.receiver.peer_lost(PREFILL)
    side.stopped(grant)
    side.refused(grant)
    assert side.receiver.num_stale_messages == 2
    assert side.receiver.num_quarantined_pages() == len(grant.page_indices)


def test_confirmation_that_crosses_the_landing_is_ignored_without_being_stale(side: DecodeSide) -> None:
    grant = side.open()
    side.cancel(grant.handoff_id)
    side.all_land(grant)
    side.stopped(grant)
    side.refused(grant)
    assert side.receiver.num_stale_messages == 0
    assert side.receiver.take_outcomes() == []
    assert side.is_whole()
