"""Who holds what on one data parallel rank, as the books of roles, scheduler and messenger have it. Sans-IO."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from pdserve.decode.choice import ChoicePhase
from pdserve.decode.request import Phase
from pdserve.decode.role import DecodeRole
from pdserve.ids import Immediate, PageIndex, SequenceId, TailSlot
from pdserve.prefill.role import PrefillRole
from pdserve.schedule.copies import CopyPhase
from pdserve.schedule.place import Place, Placed
from pdserve.transfer.handoff import ReceiverState, SenderState
from pdserve.transfer.outcome import HandoffLanded
from pdserve.transfer.receiver import Receiver
from pdserve.transfer.sender import Sender
from pdserve.worker.rank_core import RankCore


class LandedPhase(Enum):
    LANDED = "landed"
    """The receiver gave it up; the decode role has not taken it yet."""


class StrayPhase(Enum):
    STRAY = "stray"
    """In the scheduler, but neither role knows why."""


HoldingPhase = Phase | ChoicePhase | ReceiverState | SenderState | LandedPhase | CopyPhase | StrayPhase


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """What one owner has."""

    owner: str
    phase: HoldingPhase
    place: Place | None = None
    """Of its sequence, where the scheduler has one."""
    since_ns: int | None = None
    page_indices: tuple[PageIndex, ...] = ()
    tail_slot: TailSlot | None = None
    immediate: Immediate | None = None


def holdings_of(rank: RankCore, *, sender: Sender | None, receiver: Receiver | None) -> list[Holding]:
    """Of all owners. `sender` and `receiver` are the worker's."""
    placed = {each.sequence.sequence_id: each for each in rank.scheduler.placed}
    holdings: list[Holding] = []
    if rank.decode is not None:
        holdings += _requests(rank.decode)
        holdings += _choices(rank.decode, placed)
    if receiver is not None:
        holdings += _incoming(receiver, rank.dp_rank)
    if rank.prefill is not None and sender is not None:
        holdings += _outgoing(rank.prefill, sender, placed)
    holdings += _copies(rank)
    holdings += _strays(rank, placed)
    return holdings


def _requests(decode: DecodeRole) -> Iterator[Holding]:
    requests = {request.request_id: request for request, _ in decode.owners.values()}
    for request in requests.values():
        yield Holding(
            owner=f"request {request.request_id}",
            phase=request.phase,
            since_ns=request.arrival_ns,
            tail_slot=request.tail_slot,
        )


def _choices(decode: DecodeRole, placed: dict[SequenceId, Placed]) -> Iterator[Holding]:
    """Those that the scheduler has, finished ones too: they hold their pages to the end of the running pass."""
    for sequence_id, (request, choice) in decode.owners.items():
        if sequence_id in placed:
            yield _of_sequence(
                placed[sequence_id], owner=f"choice {choice.index} of request {request.request_id}", phase=choice.phase
            )


def _incoming(receiver: Receiver, dp_rank: int) -> Iterator[Holding]:
    for handoff in receiver.handoffs:
        if handoff.dp_rank == dp_rank:
            yield Holding(
                owner=f"handoff {handoff.handoff_id} of request {handoff.request_id}",
                phase=handoff.state,
                since_ns=handoff.opened_ns,
                page_indices=tuple(handoff.page_indices),
                tail_slot=handoff.tail_slot,
                immediate=handoff.immediate,
            )
    for outcome in receiver.untaken(dp_rank):
        if isinstance(outcome, HandoffLanded):
            yield Holding(
                owner=f"handoff {outcome.handoff_id} of request {outcome.request_id}",
                phase=LandedPhase.LANDED,
                since_ns=outcome.landed.last_ns,
                page_indices=tuple(outcome.page_indices),
                tail_slot=outcome.tail_slot,
            )


def _outgoing(prefill: PrefillRole, sender: Sender, placed: dict[SequenceId, Placed]) -> Iterator[Holding]:
    for handoff in sender.handoffs:
        peer = handoff.session.worker_id
        owner = f"handoff {handoff.key[1]} of request {handoff.grant.request_id} to {peer}"
        held, sequence_id = prefill.held.get(handoff.key), prefill.sequence_ids.get(handoff.key)
        if held is not None:
            yield Holding(
                owner=owner,
                phase=handoff.state,
                since_ns=held.arrival_ns,
                page_indices=tuple(held.page_indices),
                tail_slot=None if held.tail_slot is None else TailSlot(held.tail_slot),
            )
        elif sequence_id is not None and sequence_id in placed:
            yield _of_sequence(placed[sequence_id], owner=owner, phase=handoff.state)
        else:
            yield Holding(owner=owner, phase=handoff.state)


def _copies(rank: RankCore) -> Iterator[Holding]:
    """A copy owns its source until its pass has ended; its target is the forked sequence's."""
    for phase, copy in rank.scheduler.copies:
        yield Holding(owner=f"copy to page {copy.target}", phase=phase, page_indices=(PageIndex(copy.source),))


def _strays(rank: RankCore, placed: dict[SequenceId, Placed]) -> Iterator[Holding]:
    known = set(rank.decode.owners if rank.decode is not None else ())
    known.update(rank.prefill.sequence_ids.values() if rank.prefill is not None else ())
    for sequence_id in placed.keys() - known:
        yield _of_sequence(placed[sequence_id], owner=f"sequence {sequence_id} of nobody", phase=StrayPhase.STRAY)


def _of_sequence(placed: Placed, *, owner: str, phase: HoldingPhase) -> Holding:
    sequence = placed.sequence
    return Holding(
        owner=owner,
        phase=phase,
        place=placed.place,
        since_ns=sequence.arrival_ns,
        page_indices=tuple(sequence.page_indices),
        tail_slot=None if sequence.tail_slot is None else TailSlot(sequence.tail_slot),
    )
