"""The two state tables of a handoff: every pair decided, and the invariants of `handoff`'s docstring over all paths."""

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Generic

import pytest

from pdserve.errors import InternalError
from pdserve.transfer.handoff import (
    RECEIVER_TABLE,
    SENDER_TABLE,
    Decision,
    Event,
    ReceiverEvent,
    ReceiverState,
    SenderEvent,
    SenderState,
    State,
    advance_receiver,
    advance_sender,
)

RECEIVER_PAIRS = [(state, event) for state in ReceiverState for event in ReceiverEvent]
SENDER_PAIRS = [(state, event) for state in SenderState for event in SenderEvent]


@dataclass(frozen=True, slots=True)
class Step(Generic[State, Event]):
    """A move, and the kinds of events that moved the handoff before it."""

    before: State
    event: Event
    after: State
    earlier: frozenset[Event]


def all_steps(table: Mapping[State, Mapping[Event, State | Decision]], initial: State) -> Iterator[Step[State, Event]]:
    """Every move that a handoff can make, after every set of earlier moves from which it can make it."""
    no_events: frozenset[Event] = frozenset()
    places = deque([(initial, no_events)])
    seen = set(places)
    while places:
        state, earlier = places.popleft()
        for event, after in table[state].items():
            if isinstance(after, Decision):
                continue
            yield Step(state, event, after, earlier)
            place = (after, earlier | {event})
            if place not in seen:
                seen.add(place)
                places.append(place)


RECEIVER_STEPS = list(all_steps(RECEIVER_TABLE, ReceiverState.GRANTED))
SENDER_STEPS = list(all_steps(SENDER_TABLE, SenderState.QUEUED))


# Every pair is decided


def test_receiver_table_decides_every_pair() -> None:
    assert set(RECEIVER_TABLE) == set(ReceiverState)
    assert all(set(row) == set(ReceiverEvent) for row in RECEIVER_TABLE.values())


def test_sender_table_decides_every_pair() -> None:
    assert set(SENDER_TABLE) == set(SenderState)
    assert all(set(row) == set(SenderEvent) for row in SENDER_TABLE.values())


@pytest.mark.parametrize(("state", "event"), RECEIVER_PAIRS)
def test_receiver_advance_follows_its_table(state: ReceiverState, event: ReceiverEvent) -> None:
    match RECEIVER_TABLE[state][event]:
        case Decision.IGNORE:
            assert advance_receiver(state, event, handoff="7") is None
        case Decision.ILLEGAL:
            with pytest.raises(InternalError, match=f"handoff 7: {event.name} in state {state.name}"):
                advance_receiver(state, event, handoff="7")
        case after:
            assert advance_receiver(state, event, handoff="7") is after


@pytest.mark.parametrize(("state", "event"), SENDER_PAIRS)
def test_sender_advance_follows_its_table(state: SenderState, event: SenderEvent) -> None:
    match SENDER_TABLE[state][event]:
        case Decision.IGNORE:
            assert advance_sender(state, event, handoff="7") is None
        case Decision.ILLEGAL:
            with pytest.raises(InternalError, match=f"handoff 7: {event.name} in state {state.name}"):
                advance_sender(state, event, handoff="7")
        case after:
            assert advance_sender(state, event, handoff="7") is after


# Invariants over all paths


def test_receiver_states_are_all_reached_and_lead_to_closed() -> None:
    reached = {ReceiverState.GRANTED} | {step.after for step in RECEIVER_STEPS}
    assert reached == set(ReceiverState)
    for state in ReceiverState:
        ends = {state} | {step.after for step in all_steps(RECEIVER_TABLE, state)}
        assert ReceiverState.CLOSED in ends


def test_sender_states_are_all_reached_and_lead_to_closed() -> None:
    reached = {SenderState.QUEUED} | {step.after for step in SENDER_STEPS}
    assert reached == set(SenderState)
    for state in SenderState:
        ends = {state} | {step.after for step in all_steps(SENDER_TABLE, state)}
        assert SenderState.CLOSED in ends


def test_closed_on_either_side_is_final() -> None:
    assert not list(all_steps(RECEIVER_TABLE, ReceiverState.CLOSED))
    assert not list(all_steps(SENDER_TABLE, SenderState.CLOSED))


def test_receiver_closes_only_when_nobody_may_write() -> None:
    """Invariant 2 (H2)."""
    closing = {step.event for step in RECEIVER_STEPS if step.after is ReceiverState.CLOSED}
    proofs = {ReceiverEvent.LANDED, ReceiverEvent.REFUSED, ReceiverEvent.STOPPED, ReceiverEvent.FENCED}
    assert closing == proofs


def test_receiver_closed_by_a_fence_has_lost_its_peer() -> None:
    for step in RECEIVER_STEPS:
        if step.event is ReceiverEvent.FENCED:
            assert ReceiverEvent.PEER_LOST in step.earlier


def test_receiver_after_the_loss_of_its_peer_closes_without_the_peers_word() -> None:
    for step in RECEIVER_STEPS:
        if ReceiverEvent.PEER_LOST in step.earlier:
            assert step.event in {ReceiverEvent.LANDED, ReceiverEvent.FENCED}


def test_receiver_once_unwanted_is_never_granted_again() -> None:
    """Invariant 3 (H1): landing makes a request schedulable from GRANTED alone, and nothing leads back to it."""
    assert not [step for step in RECEIVER_STEPS if step.after is ReceiverState.GRANTED]
    unwanted = {ReceiverEvent.CANCEL, ReceiverEvent.EXPIRED, ReceiverEvent.PEER_LOST}
    assert not [step for step in RECEIVER_STEPS if step.before is ReceiverState.GRANTED and step.earlier & unwanted]


def test_sender_closes_only_after_it_drained() -> None:
    """Invariant 4 (H3)."""
    for step in SENDER_STEPS:
        if step.after is SenderState.CLOSED:
            assert SenderEvent.DRAINED in step.earlier | {step.event}


def test_sender_that_drained_or_stopped_arms_nothing_more() -> None:
    final = {SenderEvent.DRAINED, SenderEvent.CANCEL, SenderEvent.PUSH_FAILED, SenderEvent.PEER_LOST, SenderEvent.SEAL}
    for step in SENDER_STEPS:
        if step.event in {SenderEvent.ARM, SenderEvent.SEAL}:
            assert not step.earlier & final


def test_sender_flush_ends_only_while_flushing() -> None:
    """Invariant 5: the confirmation is sent on FLUSHING --FLUSHED--> and nothing else could be taken for it."""
    for state in SenderState:
        decision = SENDER_TABLE[state][SenderEvent.FLUSHED]
        match state:
            case SenderState.FLUSHING:
                assert decision is SenderState.CLOSED
            case SenderState.CLOSED:
                assert decision is Decision.IGNORE
            case _:
                assert decision is Decision.ILLEGAL


def test_sender_flushes_only_after_it_stopped_and_drained() -> None:
    entering = {(step.before, step.event) for step in SENDER_STEPS if step.after is SenderState.FLUSHING}
    assert entering == {(SenderState.STOPPING, SenderEvent.DRAINED)}


def test_sender_confirms_nothing_to_a_lost_peer() -> None:
    for step in SENDER_STEPS:
        if step.event is SenderEvent.FLUSHED:
            assert SenderEvent.PEER_LOST not in step.earlier
