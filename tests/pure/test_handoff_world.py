"""Random lives of workers, by seed: every rule is checked after every event, and all is given back in the end."""

from collections.abc import Mapping

import pytest
from tests.pure.handoff_lives import NUM_SEEDS, SHAPES, calm, live, random_prompt
from tests.pure.handoff_story import PATIENT_S
from tests.pure.handoff_world import World
from tests.pure.toy_model import GQA

from pdserve.fabric.memory import MemoryFaults
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
from pdserve.wire.cluster import FinishReason

CHUNK_TOKENS = 7
EDGES = [2, *(edge + more for edge in (GQA.page_slots, CHUNK_TOKENS, 12) for more in (-1, 0, 1, 2))]


@pytest.mark.parametrize("num_tokens", EDGES)
@pytest.mark.parametrize("shape", range(len(SHAPES)))
def test_prompt_on_a_calm_network_is_handed_over_and_answered(shape: int, num_tokens: int) -> None:
    """H8: at every edge of pages and chunks, between all shardings."""
    calm(SHAPES[shape], num_tokens)


@pytest.mark.parametrize("seed", range(len(SHAPES)))
def test_crowd_on_a_calm_network_is_answered_whole(seed: int) -> None:
    """More requests than pages, tail slots and places in the queue: some are refused a handoff, none an answer."""
    faults = MemoryFaults(max_delay_ns=NS_PER_MS, reorder=True)
    world = World(seed, SHAPES[seed], faults=faults, num_prefill=2)
    for _ in range(25):
        world.submit(world.decode[0], random_prompt(world), max_tokens=6, timeout_s=PATIENT_S, is_remote=True)
    world.settle()
    assert [story.endings for story in world.stories.values()] == [[FinishReason.LENGTH.value]] * 25
    world.close()


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
