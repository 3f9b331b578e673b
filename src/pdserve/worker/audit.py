"""What of a worker nobody owns (rule H7). Sans-IO.

Between two events of the core, not only at idle:

1. A page has as many owners in its pool as holdings name it. One with more owners than that never becomes free; one
   with fewer is held by somebody to whom it does not belong, and may be given to another (H2).
2. A tail slot or immediate that is in use is named by exactly one holding.
3. The scheduler has the sequence of every choice that is scheduled, or has ended in the running pass, and of every
   handoff whose sequence the prefill role does not hold; and no other. A request in handoff has an open handoff.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import compress
from operator import ne

from pdserve.decode.choice import ChoicePhase
from pdserve.decode.request import Phase
from pdserve.decode.role import DecodeRole
from pdserve.ids import SequenceId
from pdserve.kv.pages import PagePool
from pdserve.prefill.role import PrefillRole
from pdserve.transfer.receiver import Receiver
from pdserve.transfer.sender import Sender
from pdserve.worker.core import WorkerCore
from pdserve.worker.holdings import Holding, holdings_of
from pdserve.worker.rank_core import RankCore


class LeakKind(Enum):
    PAGES = "pages"
    TAIL_SLOTS = "tail_slots"
    IMMEDIATES = "immediates"
    SEQUENCES = "sequences"


@dataclass(frozen=True, slots=True, kw_only=True)
class Leak:
    """Something that the books disagree about; each is one in the metric."""

    kind: LeakKind
    dp_rank: int | None
    """None: the ranks share it."""
    subject: int | str
    """Page, slot, immediate or sequence; or the handoff or request that has no sequence."""
    message: str


def audit(core: WorkerCore) -> list[Leak]:
    """Empty when all is owned. Cost: O(pages and sequences)."""
    leaks: list[Leak] = []
    named: Counter[int] = Counter()
    for rank in core.ranks:
        holdings = holdings_of(rank, sender=core.sender, receiver=core.receiver)
        named.update(holding.immediate for holding in holdings if holding.immediate is not None)
        leaks += _pages(rank.dp_rank, rank.pool, holdings)
        leaks += _tail_slots(rank, core.receiver, holdings)
        leaks += _sequences(rank, core)
    if core.receiver is not None:
        leaks += _slots(LeakKind.IMMEDIATES, None, core.receiver.used_immediates, named)
    return leaks


def _pages(dp_rank: int, pool: PagePool, holdings: Iterable[Holding]) -> Iterator[Leak]:
    num_known = [0] * pool.num_pages
    for holding in holdings:
        for page_index in holding.page_indices:
            num_known[page_index] += 1
    num_owners = pool.num_owners
    differing = compress(range(pool.num_pages), map(ne, num_owners, num_known))
    for index in differing:
        message = f"owners of page {index}: {num_owners[index]} by the pool, {num_known[index]} known"
        yield Leak(kind=LeakKind.PAGES, dp_rank=dp_rank, subject=index, message=message)
    if num_owners.count(0) != pool.num_free:
        message = f"pages without owner: {num_owners.count(0)}, but {pool.num_free} are free"
        yield Leak(kind=LeakKind.PAGES, dp_rank=dp_rank, subject="free", message=message)


def _tail_slots(rank: RankCore, receiver: Receiver | None, holdings: Iterable[Holding]) -> Iterator[Leak]:
    named = Counter[int](holding.tail_slot for holding in holdings if holding.tail_slot is not None)
    if rank.prefill is not None:
        yield from _slots(LeakKind.TAIL_SLOTS, rank.dp_rank, rank.prefill.used_tail_slots, named)
    elif receiver is not None:
        yield from _slots(LeakKind.TAIL_SLOTS, rank.dp_rank, receiver.used_tail_slots(rank.dp_rank), named)


def _slots(kind: LeakKind, dp_rank: int | None, used: Iterable[int], named: Counter[int]) -> Iterator[Leak]:
    in_use = set(used)
    for slot in sorted(in_use | named.keys()):
        if (slot in in_use, named[slot]) != (True, 1):
            state = "in use" if slot in in_use else "free"
            message = f"{kind.value.removesuffix('s').replace('_', ' ')} {slot} is {state}, owners known: {named[slot]}"
            yield Leak(kind=kind, dp_rank=dp_rank, subject=slot, message=message)


def _sequences(rank: RankCore, core: WorkerCore) -> Iterator[Leak]:
    scheduled = {placed.sequence.sequence_id for placed in rank.scheduler.placed}
    expected: dict[SequenceId, str] = {}
    if rank.decode is not None:
        expected |= _computed_choices(rank.decode)
    if rank.prefill is not None:
        expected |= _computed_handoffs(rank.prefill)
    for sequence_id in sorted(scheduled - expected.keys()):
        message = f"sequence {sequence_id} is scheduled, and nobody waits for it"
        yield _lost_sequence(rank, sequence_id, message)
    for sequence_id in sorted(expected.keys() - scheduled):
        yield _lost_sequence(rank, sequence_id, f"{expected[sequence_id]} waits for a sequence that is not scheduled")
    if rank.decode is not None and core.receiver is not None:
        yield from _requests_without_handoff(rank, rank.decode, core.receiver)
    if rank.prefill is not None and core.sender is not None:
        yield from _handoffs_without_sequence(rank, rank.prefill, core.sender)


def _computed_choices(decode: DecodeRole) -> dict[SequenceId, str]:
    return {
        sequence_id: f"choice {choice.index} of request {request.request_id}"
        for sequence_id, (request, choice) in decode.owners.items()
        if choice.phase is not ChoicePhase.WAITING
    }


def _computed_handoffs(prefill: PrefillRole) -> dict[SequenceId, str]:
    return {
        sequence_id: f"handoff {key[1]} of peer {key[0]}"
        for key, sequence_id in prefill.sequence_ids.items()
        if key not in prefill.held
    }


def _requests_without_handoff(rank: RankCore, decode: DecodeRole, receiver: Receiver) -> Iterator[Leak]:
    """Or that have ended, and left a choice that waits."""
    open_ids = {handoff.handoff_id for handoff in receiver.handoffs}
    open_ids |= {outcome.handoff_id for outcome in receiver.untaken(rank.dp_rank)}
    for sequence_id, (request, choice) in decode.owners.items():
        if request.phase is Phase.HANDOFF and request.handoff_id not in open_ids:
            message = f"choice {choice.index} of request {request.request_id} waits for a handoff that is closed"
            yield _lost_sequence(rank, sequence_id, message)
        if request.phase is Phase.ENDED and choice.phase is ChoicePhase.WAITING:
            message = f"choice {choice.index} of request {request.request_id} waits, though the request has ended"
            yield _lost_sequence(rank, sequence_id, message)


def _handoffs_without_sequence(rank: RankCore, prefill: PrefillRole, sender: Sender) -> Iterator[Leak]:
    open_keys = {handoff.key for handoff in sender.handoffs}
    for key in sorted(open_keys ^ prefill.sequence_ids.keys()):
        has, lacks = ("sender", "role") if key in open_keys else ("role", "sender")
        message = f"the prefill {has} has handoff {key[1]} of peer {key[0]}, the {lacks} does not"
        yield _lost_sequence(rank, f"handoff {key[1]} of peer {key[0]}", message)


def _lost_sequence(rank: RankCore, subject: int | str, message: str) -> Leak:
    return Leak(kind=LeakKind.SEQUENCES, dp_rank=rank.dp_rank, subject=subject, message=message)
