"""Workers of many ranks and shapes: prompts are handed over and answered, whatever the shardings of the two sides."""

from collections.abc import Mapping

import pytest
from tests.pure.simulated_worlds import EDGES, SHAPES, anything, calm_plan, plans_with_faults

from pdserve.simulate.plan import Plan
from pdserve.simulate.simulation import run
from pdserve.simulate.world import World
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
from pdserve.units import NS_PER_MS
from pdserve.wire.cluster import PrefillPlace


def answers(plan: Plan) -> list[tuple[list[str], PrefillPlace | None]]:
    """The endings of each request, and where it was prefilled, in a world that kept every rule."""
    world = World(plan)
    try:
        assert world.run() is None
        return [(client.endings, client.place) for client in world.clients]
    finally:
        world.close()


@pytest.mark.parametrize("shape", range(len(SHAPES)))
def test_prompt_on_a_calm_network_is_handed_over_and_answered(shape: int) -> None:
    """H8: at every edge of pages and chunks, between all shardings."""
    plan = calm_plan(SHAPES[shape], EDGES, spacing_ns=200 * NS_PER_MS)
    assert answers(plan) == [(["answered"], PrefillPlace.REMOTE)] * len(EDGES)


@pytest.mark.parametrize("shape", range(len(SHAPES)))
def test_crowd_on_a_calm_network_is_answered_whole(shape: int) -> None:
    """More requests than pages and tail slots: some are refused a handoff, none an answer."""
    plan = calm_plan(SHAPES[shape], [*EDGES, *range(20, 30)], spacing_ns=0, num_prefill=2)
    assert [endings for endings, _ in answers(plan)] == [["answered"]] * len(plan.arrivals)


def test_worlds_of_seeds_make_every_move_of_both_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    moves: set[tuple[ReceiverState | SenderState, ReceiverEvent | SenderEvent]] = set()

    def receiver(state: ReceiverState, event: ReceiverEvent, *, handoff: str) -> ReceiverState | None:
        moves.add((state, event))
        return advance_receiver(state, event, handoff=handoff)

    def sender(state: SenderState, event: SenderEvent, *, handoff: str) -> SenderState | None:
        moves.add((state, event))
        return advance_sender(state, event, handoff=handoff)

    monkeypatch.setattr("pdserve.transfer.receiver.advance_receiver", receiver)
    monkeypatch.setattr("pdserve.transfer.sender.advance_sender", sender)
    missing = moving(RECEIVER_TABLE) | moving(SENDER_TABLE)
    for plan in plans_with_faults(anything):
        assert run(plan)[0] is None
        missing -= moves
        if not missing:
            return
    pytest.fail(f"no world made the moves {missing}")


def moving(table: Mapping[State, Mapping[Event, State | Decision]]) -> set[tuple[State, Event]]:
    return {
        (before, event)
        for before, row in table.items()
        for event, after in row.items()
        if not isinstance(after, Decision)
    }
