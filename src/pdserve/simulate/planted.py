"""Bugs planted in the product's code, to show that the world finds them: each breaks one of the rules on purpose."""

# pyright: reportPrivateUsage=false

from collections.abc import Callable, Generator
from contextlib import contextmanager
from enum import Enum
from typing import Any

from pdserve.ids import Immediate, Incarnation
from pdserve.prefill.role import PrefillRole
from pdserve.schedule.batch import Batch, BatchResult
from pdserve.schedule.outcome import StepOutcome
from pdserve.transfer import handoff, receiver, sender
from pdserve.transfer.handoff import RECEIVER_TABLE, ReceiverEvent, ReceiverState
from pdserve.transfer.plan import num_writes
from pdserve.wire.peer import Addressed


class Plant(Enum):
    SKIP_QUARANTINE = "skip-quarantine"
    """Pages of a cancelled or lost handoff are given to others at once (H2)."""
    FORGET_INCARNATION = "forget-incarnation"
    """Messages of earlier incarnations are obeyed (H4)."""
    REUSE_IMMEDIATE = "reuse-immediate"
    """A cancelled handoff's immediate goes to the next one, while writes may still come under it (H5)."""
    FREE_EARLY = "free-early"
    """The prefill side frees pages whose writes have not ended (H3)."""
    COUNT_ONE_LESS = "count-one-less"
    """A handoff counts as landed one write too early (H1)."""


@contextmanager
def planted(plant: Plant) -> Generator[None]:
    """The bug is in this process's code until the end of the block."""
    patches = PATCHES[plant]()
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in patches]
    for owner, name, patch in patches:
        setattr(owner, name, patch)
    try:
        yield
    finally:
        for owner, name, original in before:
            setattr(owner, name, original)


Patch = tuple[Any, str, object]
"""What is replaced in which class or module, and by what."""


def _skip_quarantine() -> list[Patch]:
    granted = {
        **RECEIVER_TABLE[ReceiverState.GRANTED],
        ReceiverEvent.CANCEL: ReceiverState.CLOSED,
        ReceiverEvent.PEER_LOST: ReceiverState.CLOSED,
    }
    return [(handoff, "RECEIVER_TABLE", {**RECEIVER_TABLE, ReceiverState.GRANTED: granted})]


def _forget_incarnation() -> list[Patch]:
    def is_current(self: receiver.Receiver | sender.Sender, peer: Incarnation, message: Addressed) -> bool:
        del message
        return self.is_connected(peer)

    return [(receiver.Receiver, "_is_current", is_current), (sender.Sender, "_is_current", is_current)]


def _reuse_immediate() -> list[Patch]:
    apply: Callable[..., bool] = receiver.Receiver._apply

    def apply_and_release(self: receiver.Receiver, found: Any, *arguments: Any, **options: Any) -> bool:
        moved = apply(self, found, *arguments, **options)
        if moved and found.state is ReceiverState.CANCELLING and self._immediates.num_free:
            given_back: Immediate = found.immediate
            del self._by_immediate[given_back]
            found.immediate = self._immediates.allocate()
            self._by_immediate[found.immediate] = found
            self._fabric.forget(given_back)
            self._immediates.release(given_back)
        return moved

    return [(receiver.Receiver, "_apply", apply_and_release)]


def _free_early() -> list[Patch]:
    after_pass: Callable[..., None] = PrefillRole.after_pass

    def after_pass_and_free(
        self: PrefillRole, batch: Batch, result: BatchResult, outcome: StepOutcome, **at: Any
    ) -> None:
        after_pass(self, batch, result, outcome, **at)
        for sequence in outcome.prefilled:
            if sequence.sequence_id in self._keys:
                self._pool.release(sequence.page_indices)
                sequence.page_indices.clear()

    return [(PrefillRole, "after_pass", after_pass_and_free)]


def _count_one_less() -> list[Patch]:
    def miscount(*arguments: Any, **options: Any) -> int:
        return num_writes(*arguments, **options) - 1

    return [(receiver, "num_writes", miscount)]


PATCHES: dict[Plant, Callable[[], list[Patch]]] = {
    Plant.SKIP_QUARANTINE: _skip_quarantine,
    Plant.FORGET_INCARNATION: _forget_incarnation,
    Plant.REUSE_IMMEDIATE: _reuse_immediate,
    Plant.FREE_EARLY: _free_early,
    Plant.COUNT_ONE_LESS: _count_one_less,
}
