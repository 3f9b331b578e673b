"""Random lives of workers, by seed: every rule is checked after every event, and all is given back in the end."""

from collections.abc import Mapping

import pytest
from tests.pure.handoff_lives import NUM_SEEDS, live

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


@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_random_life_keeps_every_rule_and_ends_idle(seed: int) -> None:
    live(seed)


def test_random_lives_make_every_move_of_both_tables(monkeypatch: pytest.MonkeyPatch) -> None:
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
    for seed in range(NUM_SEEDS, 4 * NUM_SEEDS):
        live(seed)
        missing -= moves
        if not missing:
            return
    pytest.fail(f"no life made the moves {missing}")


def moving(table: Mapping[State, Mapping[Event, State | Decision]]) -> set[tuple[State, Event]]:
    return {
        (before, event)
        for before, row in table.items()
        for event, after in row.items()
        if not isinstance(after, Decision)
    }
