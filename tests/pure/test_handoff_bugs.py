"""Bugs planted in the messenger: worlds of the simulator find each, so they would find it if it were ours.

Those of `pdserve.simulate.planted` are found in `test_simulate_world`; these are others.
"""

# pyright: reportPrivateUsage=false

from collections.abc import Callable
from typing import Any

import pytest
from tests.pure.simulated_worlds import (
    draining_plans,
    has_drafter,
    require_found,
    require_found_in,
    require_found_when_calm,
)

from pdserve.decode.role import DecodeRole
from pdserve.fabric.port import IMMEDIATE_GENERATION_BITS, FlushEnded, FlushId
from pdserve.ids import HandoffId, Immediate, Incarnation
from pdserve.kv.shard import KvSharding
from pdserve.transfer.handoff import RECEIVER_TABLE, ReceiverEvent, ReceiverState
from pdserve.transfer.immediates import ImmediatePool
from pdserve.transfer.outcome import HandoffFailed
from pdserve.transfer.plan import num_writes, pages_completed
from pdserve.transfer.receiver import Receiver
from pdserve.transfer.sender import Sender
from pdserve.wire.peer import Addressed


@pytest.mark.parametrize("event", [ReceiverEvent.CANCEL, ReceiverEvent.PEER_LOST])
def test_pages_released_before_the_peer_is_silent_are_found(
    monkeypatch: pytest.MonkeyPatch, event: ReceiverEvent
) -> None:
    granted: dict[ReceiverEvent, Any] = {**RECEIVER_TABLE[ReceiverState.GRANTED], event: ReceiverState.CLOSED}
    monkeypatch.setattr("pdserve.transfer.handoff.RECEIVER_TABLE", {**RECEIVER_TABLE, ReceiverState.GRANTED: granted})
    require_found("H2", "H3", "H5")


def test_count_of_one_write_too_many_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The request never lands."""

    def miscount(source: KvSharding, target: KvSharding, **tokens: Any) -> int:
        return num_writes(source, target, **tokens) + 1

    monkeypatch.setattr("pdserve.transfer.receiver.num_writes", miscount)
    require_found_when_calm("H7")


@pytest.mark.parametrize("condition", ["in_pass", "outstanding"])
def test_sender_that_does_not_drain_is_found(monkeypatch: pytest.MonkeyPatch, condition: str) -> None:
    drain = Sender._drain

    def drain_at_once(self: Sender, handoff: Any, *, now_ns: int) -> None:
        kept = getattr(handoff, condition)
        setattr(handoff, condition, type(kept)())
        drain(self, handoff, now_ns=now_ns)
        setattr(handoff, condition, kept)

    monkeypatch.setattr(Sender, "_drain", drain_at_once)
    require_found("H", "KeyError")


def test_confirmation_without_a_flush_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def confirm_at_once(self: Sender, session: Any, handoff_id: HandoffId, *, now_ns: int) -> None:
        del now_ns
        flush_id = FlushId(self._next_flush_id)
        self._next_flush_id += 1
        self._flushes[flush_id] = (session, handoff_id)
        self.on_flush_ended(FlushEnded(flush_id=flush_id, delivered=True, errno=0))

    monkeypatch.setattr(Sender, "_flush", confirm_at_once)
    require_found("H2")


def test_worker_that_leaves_before_its_writes_have_landed_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def believe(self: Sender, *, now_ns: int) -> None:
        del self, now_ns

    monkeypatch.setattr(Sender, "prove_delivery", believe)
    require_found_in(draining_plans(), "H10")


@pytest.mark.parametrize("arming", ["_arm_pages", "_arm_draft_pages", "_arm_tail"])
def test_push_before_its_layer_is_computed_is_found(monkeypatch: pytest.MonkeyPatch, arming: str) -> None:
    arm: Callable[..., None] = getattr(Sender, arming)

    def arm_early(self: Sender, *arguments: Any, tick: int) -> None:
        arm(self, *arguments, tick=tick - 1)

    monkeypatch.setattr(Sender, arming, arm_early)
    require_found("H3", where=has_drafter)


def test_drafters_page_pushed_before_the_token_that_fills_its_last_slot_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pdserve.transfer.sender.draft_pages_completed", pages_completed)
    require_found("H3", where=has_drafter)


def test_drafters_pages_that_are_not_counted_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def miscount(source: KvSharding, target: KvSharding, **tokens: Any) -> int:
        del tokens["draft_layout"]
        return num_writes(source, target, **tokens)

    monkeypatch.setattr("pdserve.transfer.receiver.num_writes", miscount)
    require_found("H1", "H2", where=has_drafter)


def test_tail_slot_given_back_when_it_lands_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next tail lands in it before the first pass of the sequence, which begins with it."""
    close = Receiver._close

    def close_all(self: Receiver, handoff: Any, *, delivers: bool) -> None:
        close(self, handoff, delivers=delivers)
        if delivers:
            self.release_tail_slot(handoff.dp_rank, handoff.tail_slot)

    monkeypatch.setattr(Receiver, "_close", close_all)
    require_found("H", "InternalError: tail slot")


@pytest.mark.parametrize("side", [Receiver, Sender])
def test_obeyed_message_of_an_earlier_incarnation_is_found(
    monkeypatch: pytest.MonkeyPatch, side: type[Receiver] | type[Sender]
) -> None:
    def is_current(self: Receiver | Sender, peer: Incarnation, message: Addressed) -> bool:
        del message
        return self.is_connected(peer)

    monkeypatch.setattr(side, "_is_current", is_current)
    require_found("H")


def test_immediate_that_is_not_retired_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def release(self: ImmediatePool, immediate: Immediate) -> None:
        self._slots.release(immediate >> IMMEDIATE_GENERATION_BITS)

    monkeypatch.setattr(ImmediatePool, "release", release)
    require_found("H5", "FabricError: expect: immediate")


def test_failed_handoff_that_is_not_taken_up_again_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def forget(self: DecodeRole, outcome: HandoffFailed) -> None:
        del self, outcome

    monkeypatch.setattr(DecodeRole, "_handoff_failed", forget)
    require_found("H7")
