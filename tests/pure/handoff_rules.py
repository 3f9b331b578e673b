"""The rules H1 to H7 as checks on a world of workers. They look inside the objects on purpose: they are the referee."""

# pyright: reportPrivateUsage=false

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from tests.pure.toy_drafter import reference_draft_kv
from tests.pure.toy_engine import ToyEngine
from tests.pure.toy_model import TAIL_BYTES, reference_kv, reference_tail

from pdserve.fabric.memory import MemoryFabric
from pdserve.ids import HandoffId, Incarnation, PageIndex, SequenceId
from pdserve.schedule.batch import Batch
from pdserve.schedule.scheduler import Scheduler
from pdserve.schedule.sequence import Sequence
from pdserve.transfer.handoff import SenderState
from pdserve.transfer.immediates import ImmediatePool
from pdserve.transfer.receiver import Receiver, _Handoff
from pdserve.transfer.sender import Sender
from pdserve.wire.peer import Grant
from pdserve.worker.audit import audit
from pdserve.worker.core import WorkerCore
from pdserve.worker.rank_core import RankCore

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
    def engines(self) -> tuple[ToyEngine, ...]:
        """By data parallel rank."""
        ...

    @property
    def fabric(self) -> MemoryFabric: ...


GrantKey = tuple[Incarnation, HandoffId]
"""By the decode worker and its number."""


@dataclass(slots=True)
class Referee:
    grants: dict[GrantKey, Grant] = field(default_factory=dict[GrantKey, Grant])
    num_landed_bytes: Counter[GrantKey] = field(default_factory=Counter[GrantKey])
    """On all ranks together, replicas too, and in the tail slot."""

    def granted(self, grant: Grant) -> None:
        self.grants[grant.sender, grant.handoff_id] = grant

    # As things happen

    def kv_written(self, worker: Watched, dp_rank: int, rank: int, start: int, stop: int) -> None:
        """A remote write reached a KV region: the page must be granted (H2), the bytes right (H1, H3)."""
        info = worker.engines[dp_rank].info
        layout = info.sharding.rank_layout
        layer_index, in_layer = divmod(start, layout.layer_bytes(info.num_pages))
        page_index, in_page = divmod(in_layer, layout.page_bytes)
        grant = self._grant_of_page(worker, dp_rank, page_index)
        if grant is None:
            raise RuleBroken(f"H2: a write landed on page {page_index} of rank {rank}, which no open handoff has")
        if in_page + stop - start > layout.page_bytes:
            raise RuleBroken(f"H2: a write of {stop - start} bytes left page {page_index} of {grant.request_id}")
        first_token = grant.page_indices.index(page_index) * layout.page_slots
        num_tokens = min(layout.page_slots, len(grant.token_ids) - 1 - first_token)
        own = info.sharding.heads_of(rank)
        written = slice(in_page // layout.head_bytes, (in_page + stop - start) // layout.head_bytes)
        wanted = reference_kv(info.sharding.layout, grant.token_ids[:-1])[layer_index, own.start : own.stop][written]
        landed = worker.engines[dp_rank].ranks[rank].read_page(page_index, layer_index=layer_index)[written]
        if not np.array_equal(landed[:, :, :num_tokens], wanted[:, :, first_token : first_token + num_tokens]):
            raise RuleBroken(f"H3: wrong bytes landed in page {page_index} of rank {rank} for {grant.request_id}")
        self._count(worker, grant, stop - start)

    def draft_kv_written(self, worker: Watched, dp_rank: int, start: int, stop: int) -> None:
        """The same of the drafter's cache. Its slot of the last prefilled position is filled by the decode worker."""
        info, drafter = worker.engines[dp_rank].info, worker.engines[dp_rank].drafter
        layout = info.draft_layout
        assert layout is not None and drafter is not None
        layer_index, in_layer = divmod(start, layout.layer_bytes(info.num_pages))
        page_index, in_page = divmod(in_layer, layout.page_bytes)
        grant = self._grant_of_page(worker, dp_rank, page_index)
        if grant is None:
            raise RuleBroken(f"H2: a write landed on page {page_index} of a drafter, which no open handoff has")
        if in_page or stop - start != layout.page_bytes:
            raise RuleBroken(f"H2: a write of {stop - start} bytes is no page of the drafter's cache")
        first_slot = grant.page_indices.index(page_index) * layout.page_slots
        wanted = reference_draft_kv(info.sharding.layout, layout, grant.token_ids[:-1])[layer_index]
        wanted = wanted[:, :, first_slot : first_slot + layout.page_slots]
        landed = drafter.kv.read_page(page_index, layer_index=layer_index)
        if not np.array_equal(landed[:, :, : wanted.shape[2]], wanted):
            raise RuleBroken(f"H3: wrong bytes landed in page {page_index} of a drafter for {grant.request_id}")
        self._count(worker, grant, stop - start)

    def tail_written(self, worker: Watched, dp_rank: int, start: int, tail: bytes) -> None:
        slot = start // TAIL_BYTES
        owners = [h for h in handoffs_of(worker, dp_rank) if h.tail_slot == slot]
        if len(owners) != 1:
            raise RuleBroken(f"H2: a tail landed in slot {slot}, which {len(owners)} handoffs have")
        grant = self.grants[worker.incarnation, owners[0].handoff_id]
        if tail != reference_tail(worker.engines[dp_rank].info.sharding.layout, grant.token_ids[:-1]):
            raise RuleBroken(f"H3: a wrong tail landed for {grant.request_id}")
        self._count(worker, grant, len(tail))

    def confirmed(self, worker: Watched, decode: Watched, handoff_id: HandoffId, *, num_in_flight: int) -> None:
        """H2: when a stop is confirmed, every write of the handoff has landed or failed.

        `num_in_flight` counts the writes of the pair, so it says something only when no other handoff may have some.
        """
        others = [h for h in receiver_of(decode)._handoffs.values() if h.peer == worker.incarnation]
        if num_in_flight and all(handoff.handoff_id == handoff_id for handoff in others):
            raise RuleBroken(f"H2: a stop was confirmed with {num_in_flight} writes in flight")

    def batch_starts(self, worker: Watched, dp_rank: int, batch: Batch) -> None:
        """H1: what a chunk builds on is there, to the byte, on every rank."""
        for chunk in batch.chunks:
            token_ids = token_ids_of(worker.core.ranks[dp_rank], chunk.sequence_id)
            require_kv(worker.engines[dp_rank], token_ids[: chunk.start], chunk.page_indices)

    # After each event

    def check(self, workers: Iterable[Watched]) -> None:
        alive = {worker.incarnation: worker for worker in workers}
        for worker in alive.values():
            for rank in worker.core.ranks:
                require_partition(worker, rank)
            num_stale = worker.fabric.stats().num_stale_immediates
            if num_stale:
                raise RuleBroken(f"H5: {num_stale} writes came under an immediate that was given back")
            if worker.core.sender is not None:
                self._require_writable(worker.core.sender, alive)
            if leaks := audit(worker.core):
                raise RuleBroken(f"H7: the audit finds {leaks}")

    def _require_writable(self, sender: Sender, alive: dict[Incarnation, Watched]) -> None:
        """H2: what a connected sender may still write to is still kept for it."""
        for (decode, handoff_id), handoff in sender._handoffs.items():
            worker = alive.get(decode)
            if handoff.state is SenderState.ABANDONED or worker is None:
                continue
            receiver, grant = receiver_of(worker), handoff.grant
            has_landed = self.num_landed_bytes[decode, handoff_id] == whole_bytes(worker, grant)
            is_known = sender._incarnation in receiver._sessions
            if is_known and not has_landed and handoff_id not in receiver._handoffs:
                raise RuleBroken(f"H2: {grant.request_id} may still be written to, but its pages were given back")

    # At the end

    def check_idle(self, worker: Watched) -> None:
        """H7: nothing of any request is left."""
        core = worker.core
        require_empty("armed pushes", worker.fabric.stats().num_armed_pushes)
        for rank in core.ranks:
            require_empty("sequences in the schedule", rank.scheduler.num_running + rank.scheduler.num_waiting)
            require_empty("pages", rank.pool.num_pages - rank.pool.num_free)
            if rank.decode is not None:
                require_empty("requests", rank.decode.num_open + rank.decode.num_pending)
                require_empty("sequences", len(rank.decode._by_sequence))
        if core.receiver is not None:
            receiver = core.receiver
            require_empty("handoffs", receiver.num_open + len(receiver._by_immediate))
            require_empty("immediates", NUM_IMMEDIATES - receiver._immediates.num_free)
            for destination in receiver._destinations:
                slots = destination._tail_slots
                require_empty("tail slots", slots.num_slots - slots.num_free)
        if core.sender is not None and core.prefill is not None:
            prefill, sender = core.prefill, core.sender
            require_empty("handoffs", prefill.num_open + sender.num_open)
            require_empty("pushes and flushes", len(sender._by_push) + len(sender._flushes))
            require_empty("sequences", len(prefill._keys) + len(prefill._held) + len(prefill._instants))
            require_empty("tail slots", prefill._tail_slots.num_slots - prefill._tail_slots.num_free)

    def _grant_of_page(self, worker: Watched, dp_rank: int, page_index: int) -> Grant | None:
        for handoff in handoffs_of(worker, dp_rank):
            if page_index in handoff.page_indices:
                return self.grants[worker.incarnation, handoff.handoff_id]
        return None

    def _count(self, worker: Watched, grant: Grant, num_bytes: int) -> None:
        self.num_landed_bytes[grant.sender, grant.handoff_id] += num_bytes
        if self.num_landed_bytes[grant.sender, grant.handoff_id] > whole_bytes(worker, grant):
            raise RuleBroken(f"H3: something of {grant.request_id} was written twice")


def shrink_immediates(receiver: Receiver) -> None:
    """Leave so few slots that a short life reuses them (H5)."""
    receiver._immediates = ImmediatePool(num_slots=NUM_IMMEDIATES)


def token_ids_of(rank: RankCore, sequence_id: SequenceId) -> tuple[int, ...]:
    """Of a sequence in the running pass, before what it samples."""
    return tuple(rank.scheduler._running[sequence_id].token_ids)


def receiver_of(worker: Watched) -> Receiver:
    receiver = worker.core.receiver
    if receiver is None:
        raise RuleBroken(f"H4: worker {worker.incarnation} has no decode role, but was written to")
    return receiver


def handoffs_of(worker: Watched, dp_rank: int) -> list[_Handoff]:
    """Those that hold pages of one data parallel rank."""
    return [handoff for handoff in receiver_of(worker)._handoffs.values() if handoff.dp_rank == dp_rank]


def whole_bytes(worker: Watched, grant: Grant) -> int:
    """What a handoff writes: all heads of its pages, on each rank that holds them, the drafter's, and the tail."""
    sharding = worker.engines[grant.dp_rank].info.sharding
    page_bytes = sharding.num_ranks * sharding.rank_layout.page_bytes * sharding.layout.num_layers
    draft_layout = worker.engines[grant.dp_rank].info.draft_layout
    if draft_layout is not None:
        page_bytes += draft_layout.page_bytes * draft_layout.num_layers
    return len(grant.page_indices) * page_bytes + TAIL_BYTES


def require_empty(noun: str, count: int) -> None:
    if count:
        raise RuleBroken(f"H7: {count} {noun} are left at idle")


def require_kv(engine: ToyEngine, token_ids: tuple[int, ...], page_indices: tuple[int, ...]) -> None:
    """H1, on every rank, and in the drafter's cache."""
    wanted = reference_kv(engine.info.sharding.layout, token_ids)
    for index, rank in enumerate(engine.ranks):
        kv = rank.read(page_indices, len(token_ids))
        if not np.array_equal(kv, wanted[:, rank.heads.start : rank.heads.stop]):
            raise RuleBroken(f"H1: the KV of {len(token_ids)} tokens is wrong in the pages of rank {index}")
    if engine.drafter is not None and engine.info.draft_layout is not None:
        wanted = reference_draft_kv(engine.info.sharding.layout, engine.info.draft_layout, token_ids)
        if not np.array_equal(engine.drafter.kv.read(page_indices, max(len(token_ids) - 1, 0)), wanted):
            raise RuleBroken(f"H1: the KV of {len(token_ids)} tokens is wrong in the drafter's pages")


def scheduled(scheduler: Scheduler) -> list[Sequence]:
    holders = (scheduler._running, scheduler._waiting, scheduler._handed_over)
    return [sequence for holder in holders for sequence in holder.values()]


def require_partition(worker: Watched, rank: RankCore) -> None:
    """H2, H3, H7: each page of a data parallel rank is free, or has exactly one owner."""
    owners: dict[str, list[PageIndex]] = {"nobody": rank.pool._free_stack}
    for sequence in scheduled(rank.scheduler):
        owners[f"sequence {sequence.sequence_id}"] = sequence.page_indices
    if worker.core.receiver is not None:
        for handoff in handoffs_of(worker, rank.dp_rank):
            owners[f"handoff {handoff.handoff_id}"] = handoff.page_indices
    if rank.prefill is not None:
        for key, sequence in rank.prefill._held.items():
            owners[f"push {key}"] = sequence.page_indices
    counts = Counter(page_index for pages in owners.values() for page_index in pages)
    if counts != Counter(range(rank.pool.num_pages)):
        wrong = {page: count for page in range(rank.pool.num_pages) if (count := counts[PageIndex(page)]) != 1}
        raise RuleBroken(f"H2: pages {wrong} (page: owners) among {owners} of data parallel rank {rank.dp_rank}")
