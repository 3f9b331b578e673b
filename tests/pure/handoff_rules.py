"""The rules H1 to H7 as checks on a world of workers. They look inside the objects on purpose: they are the referee."""

# pyright: reportPrivateUsage=false

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from tests.pure.toy_engine import LAYOUT, TAIL_BYTES, ToyEngine, first_keys, reference_tail, token_kv

from pdserve.fabric.memory import MemoryFabric
from pdserve.ids import HandoffId, Incarnation, PageIndex
from pdserve.kv.pages import PagePool
from pdserve.schedule.batch import Batch
from pdserve.schedule.scheduler import Scheduler
from pdserve.schedule.sequence import Sequence
from pdserve.transfer.handoff import SenderState
from pdserve.transfer.immediates import ImmediatePool
from pdserve.transfer.plan import num_writes
from pdserve.transfer.receiver import Receiver
from pdserve.transfer.sender import Sender
from pdserve.wire.peer import Grant
from pdserve.worker.core import WorkerCore

NUM_IMMEDIATES = 5


class RuleBroken(AssertionError):
    pass


class Watched(Protocol):
    """A worker as the referee sees it."""

    @property
    def incarnation(self) -> Incarnation: ...
    @property
    def core(self) -> WorkerCore: ...
    @property
    def engine(self) -> ToyEngine: ...
    @property
    def fabric(self) -> MemoryFabric: ...


GrantKey = tuple[Incarnation, HandoffId]
"""By the decode worker and its number."""


@dataclass(slots=True)
class Referee:
    grants: dict[GrantKey, Grant] = field(default_factory=dict[GrantKey, Grant])
    num_landed: Counter[GrantKey] = field(default_factory=Counter[GrantKey])

    def granted(self, grant: Grant) -> None:
        self.grants[grant.sender, grant.handoff_id] = grant

    # As things happen

    def kv_written(self, worker: Watched, start: int) -> None:
        """A remote write reached the KV region: the page must be granted (H2), the bytes right (H1, H3)."""
        layer_bytes = LAYOUT.layer_bytes(worker.engine.info.num_pages)
        page_index = start % layer_bytes // LAYOUT.page_bytes
        grant = self._grant_of_page(worker, page_index)
        if grant is None:
            raise RuleBroken(f"H2: a write landed on page {page_index}, which no open handoff has")
        place = grant.page_indices.index(page_index)
        first = place * LAYOUT.page_slots
        last = min(first + LAYOUT.page_slots, len(grant.token_ids) - 1)
        layer_index = start // layer_bytes
        for position in range(first, last):
            wanted = token_kv(first_keys(grant.token_ids)[position])
            for is_value in (False, True):
                at = (2 * layer_index + is_value) * LAYOUT.slot_bytes
                landed = worker.engine.read_slot(
                    grant.page_indices, position, layer_index=layer_index, is_value=is_value
                )
                if landed != wanted[at : at + LAYOUT.slot_bytes]:
                    raise RuleBroken(f"H3: wrong bytes landed for position {position} of {grant.request_id}")
        self.num_landed[grant.sender, grant.handoff_id] += 1

    def tail_written(self, worker: Watched, start: int, tail: bytes) -> None:
        receiver = receiver_of(worker)
        owners = [h for h in receiver._handoffs.values() if h.tail_slot == start // TAIL_BYTES]
        if len(owners) != 1:
            raise RuleBroken(f"H2: a tail landed in slot {start // TAIL_BYTES}, which {len(owners)} handoffs have")
        key = (worker.incarnation, owners[0].handoff_id)
        if tail != reference_tail(self.grants[key].token_ids[:-1]):
            raise RuleBroken(f"H3: a wrong tail landed for {self.grants[key].request_id}")
        self.num_landed[key] += 1

    def confirmed(self, worker: Watched, decode: Watched, handoff_id: HandoffId, *, num_in_flight: int) -> None:
        """H2: when a stop is confirmed, every write of the handoff has landed or failed.

        `num_in_flight` counts the writes of the pair, so it says something only when no other handoff may have some.
        """
        others = [h for h in receiver_of(decode)._handoffs.values() if h.peer == worker.incarnation]
        if num_in_flight and all(handoff.handoff_id == handoff_id for handoff in others):
            raise RuleBroken(f"H2: a stop was confirmed with {num_in_flight} writes in flight")

    def batch_starts(self, worker: Watched, batch: Batch) -> None:
        """H1: what a chunk builds on is there, to the byte."""
        for chunk in batch.chunks:
            token_ids = tuple(worker.core.scheduler._running[chunk.sequence_id].token_ids)
            require_kv(worker, token_ids[: chunk.start], chunk.page_indices)

    # After each event

    def check(self, workers: Iterable[Watched]) -> None:
        alive = {worker.incarnation: worker for worker in workers}
        for worker in alive.values():
            require_partition(worker)
            num_stale = worker.fabric.stats().num_stale_immediates
            if num_stale:
                raise RuleBroken(f"H5: {num_stale} writes came under an immediate that was given back")
            if worker.core.sender is not None:
                self._require_writable(worker.core.sender, alive)

    def _require_writable(self, sender: Sender, alive: dict[Incarnation, Watched]) -> None:
        """H2: what a connected sender may still write to is still kept for it."""
        for (decode, handoff_id), handoff in sender._handoffs.items():
            worker = alive.get(decode)
            if handoff.state is SenderState.ABANDONED or worker is None:
                continue
            receiver, grant = receiver_of(worker), handoff.grant
            wanted = num_writes(LAYOUT, num_held_tokens=0, num_prompt_tokens=len(grant.token_ids))
            has_landed = self.num_landed[decode, handoff_id] == wanted
            is_known = sender._incarnation in receiver._sessions
            if is_known and not has_landed and handoff_id not in receiver._handoffs:
                raise RuleBroken(f"H2: {grant.request_id} may still be written to, but its pages were given back")

    # At the end

    def check_idle(self, worker: Watched) -> None:
        """H7: nothing of any request is left."""
        core = worker.core
        require_empty("scheduler", core.scheduler.num_running + core.scheduler.num_waiting)
        require_empty("pages", core.pool.num_pages - core.pool.num_free)
        require_empty("armed pushes", worker.fabric.stats().num_armed_pushes)
        if core.receiver is not None and core.decode is not None:
            receiver = core.receiver
            require_empty("requests", core.decode.num_open + core.decode.num_pending)
            require_empty("sequences", len(core.decode._by_sequence))
            require_empty("handoffs", receiver.num_open + len(receiver._by_immediate))
            require_empty("immediates", NUM_IMMEDIATES - receiver._immediates.num_free)
            require_empty("tail slots", receiver._tail_slots.num_slots - receiver._tail_slots.num_free)
        if core.sender is not None and core.prefill is not None:
            prefill, sender = core.prefill, core.sender
            require_empty("handoffs", prefill.num_open + sender.num_open)
            require_empty("pushes and flushes", len(sender._by_push) + len(sender._flushes))
            require_empty("sequences", len(prefill._keys) + len(prefill._held) + len(prefill._instants))
            require_empty("tail slots", prefill._tail_slots.num_slots - prefill._tail_slots.num_free)

    def _grant_of_page(self, worker: Watched, page_index: int) -> Grant | None:
        for handoff in receiver_of(worker)._handoffs.values():
            if page_index in handoff.page_indices:
                return self.grants[worker.incarnation, handoff.handoff_id]
        return None


def shrink_immediates(receiver: Receiver) -> None:
    """Leave so few slots that a short life reuses them (H5)."""
    receiver._immediates = ImmediatePool(num_slots=NUM_IMMEDIATES)


def receiver_of(worker: Watched) -> Receiver:
    receiver = worker.core.receiver
    if receiver is None:
        raise RuleBroken(f"H4: worker {worker.incarnation} has no decode role, but was written to")
    return receiver


def require_empty(noun: str, count: int) -> None:
    if count:
        raise RuleBroken(f"H7: {count} {noun} are left at idle")


def require_kv(worker: Watched, token_ids: tuple[int, ...], page_indices: tuple[int, ...]) -> None:
    for position, first in enumerate(first_keys(token_ids)):
        if worker.engine.read_token(page_indices, position) != token_kv(first):
            raise RuleBroken(f"H1: position {position} of {len(token_ids)} is wrong in the pages")


def scheduled(scheduler: Scheduler) -> list[Sequence]:
    holders = (scheduler._running, scheduler._waiting, scheduler._handed_over)
    return [sequence for holder in holders for sequence in holder.values()]


def free_pages(pool: PagePool) -> list[PageIndex]:
    return pool._free_stack


def require_partition(worker: Watched) -> None:
    """H2, H3, H7: each page is free, or has exactly one owner."""
    core = worker.core
    owners: dict[str, list[PageIndex]] = {"nobody": free_pages(core.pool)}
    for sequence in scheduled(core.scheduler):
        owners[f"sequence {sequence.sequence_id}"] = sequence.page_indices
    if core.receiver is not None:
        for handoff in core.receiver._handoffs.values():
            owners[f"handoff {handoff.handoff_id}"] = handoff.page_indices
    if core.prefill is not None:
        for key, sequence in core.prefill._held.items():
            owners[f"push {key}"] = sequence.page_indices
    counts = Counter(page_index for pages in owners.values() for page_index in pages)
    if counts != Counter(range(core.pool.num_pages)):
        wrong = {page: count for page in range(core.pool.num_pages) if (count := counts[PageIndex(page)]) != 1}
        raise RuleBroken(f"H2: pages {wrong} (page: owners) among {owners}")
