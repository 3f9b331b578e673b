"""The rules H1 to H7 as checks on workers, by what their books show and by what is in their pages."""

# pyright: reportPrivateUsage=false

from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from itertools import product
from typing import Protocol

from pdserve.decode.request import Request
from pdserve.fabric.memory import MemoryFabric
from pdserve.fabric.memory_inbox import Exposure
from pdserve.ids import HandoffId, Incarnation, PageIndex
from pdserve.schedule.batch import Batch
from pdserve.simulate.engine import HashEngine
from pdserve.simulate.model import (
    TAIL_BYTES,
    VECTOR_BYTES,
    HeadKv,
    reference_draft_kv,
    reference_kv,
    reference_tail,
)
from pdserve.simulate.rank_kv import RankKv
from pdserve.transfer.handoff import SenderState
from pdserve.transfer.holdings import IncomingHandoff
from pdserve.transfer.receiver import Receiver
from pdserve.transfer.sender import Sender
from pdserve.wire.peer import Grant
from pdserve.worker.audit import audit
from pdserve.worker.core import WorkerCore
from pdserve.worker.rank_core import RankCore

Tokens = tuple[int, ...]


class RuleBroken(Exception):
    """A rule of the design was broken. `about` names the request, where there is one."""

    def __init__(self, message: str, *, about: str = "") -> None:
        super().__init__(message)
        self.about = about


class Watched(Protocol):
    """A worker as the referee sees it."""

    @property
    def name(self) -> str: ...
    @property
    def incarnation(self) -> Incarnation: ...
    @property
    def core(self) -> WorkerCore: ...
    @property
    def engines(self) -> tuple[HashEngine, ...]:
        """By data parallel rank."""
        ...

    @property
    def fabric(self) -> MemoryFabric: ...


class Referee:
    def __init__(self, exposures: Mapping[int, Exposure]) -> None:
        """`exposures` by key: all that are open."""
        self._exposures = exposures
        self.grants: dict[tuple[Incarnation, HandoffId], Grant] = {}
        """By the decode worker and its number."""
        self._num_landed_bytes: Counter[tuple[Incarnation, HandoffId]] = Counter()
        self._alive: dict[Incarnation, Watched] = {}

    def started(self, worker: Watched) -> None:
        self._alive[worker.incarnation] = worker
        for dp_rank, engine in enumerate(worker.engines):
            engine.tail_writes.on_write = partial(self._tail_written, worker, dp_rank)
            for kv in engine.ranks:
                kv.writes.on_write = partial(self._kv_written, worker, dp_rank, kv)
            if engine.drafter is not None:
                engine.drafter.kv.writes.on_write = partial(self._draft_written, worker, dp_rank, engine.drafter.kv)

    def died(self, worker: Watched) -> None:
        del self._alive[worker.incarnation]

    def granted(self, grant: Grant) -> None:
        self.grants[grant.sender, grant.handoff_id] = grant

    # As things happen

    def _kv_written(self, worker: Watched, dp_rank: int, kv: RankKv, start: int, stop: int) -> None:
        """A remote write reached a KV region: its page must be granted (H2), its bytes right (H1, H3)."""
        model = worker.engines[dp_rank].model

        def wanted(head: int, computed: tuple[int, ...]) -> HeadKv:
            return reference_kv(model.layout, head, computed)

        self._page_written(worker, dp_rank, kv, start, stop, wanted)

    def _draft_written(self, worker: Watched, dp_rank: int, kv: RankKv, start: int, stop: int) -> None:
        """The same of a drafter's cache, whose slot of the last prefilled position the decode worker fills."""
        model = worker.engines[dp_rank].model

        def wanted(head: int, computed: tuple[int, ...]) -> HeadKv:
            del head
            return reference_draft_kv(model, computed)

        self._page_written(worker, dp_rank, kv, start, stop, wanted)

    def _page_written(
        self, worker: Watched, dp_rank: int, kv: RankKv, start: int, stop: int, wanted: Callable[[int, Tokens], HeadKv]
    ) -> None:
        layout = kv.layout
        layer_index, in_layer = divmod(start, layout.layer_bytes(worker.engines[dp_rank].info.num_pages))
        page_index, in_page = divmod(in_layer, layout.page_bytes)
        grant = self._grant_of_page(worker, dp_rank, page_index)
        if in_page + stop - start > layout.page_bytes or in_page % layout.head_bytes:
            raise RuleBroken(f"H2: a write of {stop - start} bytes at {start} leaves its page", about=grant.request_id)
        position = grant.page_indices.index(page_index) * layout.page_slots
        written = range(in_page // layout.head_bytes, (in_page + stop - start) // layout.head_bytes)
        for head, plane in product((kv.heads[index] for index in written), range(layout.num_planes)):
            vectors = wanted(head, grant.token_ids[:-1])[layer_index][plane][position * VECTOR_BYTES :]
            vectors = vectors[: layout.page_slots * VECTOR_BYTES]
            num_slots = len(vectors) // VECTOR_BYTES
            if kv.read_page(page_index, num_slots, head=head, layer_index=layer_index, plane=plane) != vectors:
                raise RuleBroken(
                    f"H3: wrong bytes landed in page {page_index} of {worker.name}, layer {layer_index}, head {head}",
                    about=grant.request_id,
                )
        self._count(worker, grant, stop - start)

    def _grant_of_page(self, worker: Watched, dp_rank: int, page_index: int) -> Grant:
        for handoff in handoffs_of(worker, dp_rank):
            if page_index in handoff.page_indices:
                return self.grants[worker.incarnation, handoff.handoff_id]
        raise RuleBroken(f"H2: a write landed on page {page_index} of {worker.name}, which no open handoff has")

    def _tail_written(self, worker: Watched, dp_rank: int, start: int, stop: int) -> None:
        tail_slot = start // TAIL_BYTES
        owners = [handoff for handoff in handoffs_of(worker, dp_rank) if handoff.tail_slot == tail_slot]
        if len(owners) != 1:
            raise RuleBroken(
                f"H2: a tail landed in slot {tail_slot} of {worker.name}, which {len(owners)} handoffs have"
            )
        engine, grant = worker.engines[dp_rank], self.grants[worker.incarnation, owners[0].handoff_id]
        wanted = reference_tail(engine.model.layout, grant.token_ids[:-1])
        if engine.tail_region.buffer[start:stop] != wanted:
            raise RuleBroken(f"H3: a wrong tail landed in slot {tail_slot}", about=grant.request_id)
        self._count(worker, grant, stop - start)

    def prefilled(self, worker: Watched, dp_rank: int, request: Request, page_indices: tuple[PageIndex, ...]) -> None:
        """H1: the KV of a prompt is whole when its request begins to be decoded."""
        computed = request.generate.prompt_token_ids[:-1]
        require_kv(worker, dp_rank, computed, page_indices, about=request.request_id)

    def pass_started(self, worker: Watched, dp_rank: int, batch: Batch) -> None:
        """H1: what each chunk builds on is there."""
        running = worker.core.ranks[dp_rank].scheduler._running
        for chunk in batch.chunks:
            known = tuple(running[chunk.sequence_id].token_ids[: chunk.start])
            require_kv(worker, dp_rank, known, chunk.page_indices, about="")

    def after_event(self, worker: Watched) -> None:
        """What must always hold of the worker to which something happened."""
        for rank in worker.core.ranks:
            require_partition(worker, rank)
        num_stale = worker.fabric.stats().num_stale_immediates
        if num_stale:
            raise RuleBroken(f"H5: {num_stale} writes came under an immediate that {worker.name} had given back")
        if worker.core.sender is not None:
            self._require_writable(worker, worker.core.sender)
        else:
            for other in self._alive.values():
                if other.core.sender is not None and other.core.sender.is_connected(worker.incarnation):
                    self._require_writable(other, other.core.sender)

    def _require_writable(self, sender_worker: Watched, sender: Sender) -> None:
        """H2: what a connected sender may still write to is still kept for it."""
        for handoff in sender.handoffs:
            worker = self._alive.get(handoff.grant.sender)
            if handoff.state is SenderState.ABANDONED or worker is None:
                continue
            receiver, key = receiver_of(worker), handoff.key
            is_known = not receiver.can_join(sender_worker.incarnation)
            has_landed = self._num_landed_bytes[key] == whole_bytes(worker, handoff.grant)
            if is_known and not has_landed and all(kept.handoff_id != key[1] for kept in receiver.handoffs):
                raise RuleBroken(
                    f"H2: handoff {key[1]} may still be written to, but {worker.name} gave its pages back",
                    about=handoff.grant.request_id,
                )

    def audit(self, worker: Watched) -> None:
        """H7: the worker's own ledger finds nothing that nobody owns, between any two events."""
        for leak in audit(worker.core):
            raise RuleBroken(f"H7: the books of {worker.name} disagree: {leak.message}")

    def confirmed(self, worker: Watched, peer: Incarnation, handoff_id: HandoffId) -> None:
        """H2: when a stop is confirmed, every write of the handoff has landed or failed.

        The writes of a pair are counted together, so it says something only when no other handoff may have some.
        """
        decode = self._alive.get(peer)
        if decode is None or worker.core.is_draining:
            return
        session = receiver_of(decode)._sessions.get(worker.incarnation)
        is_alone = session is not None and session.handoffs <= {handoff_id}
        if is_alone and (count := self._num_in_flight(worker, decode)):
            raise RuleBroken(f"H2: the stop of handoff {handoff_id} was confirmed with {count} writes in flight")

    def drained(self, worker: Watched) -> None:
        """H10: what a worker that leaves in good order has pushed is there, wherever it is still connected."""
        for decode in self._alive.values():
            is_peer = worker.core.sender is not None and worker.core.sender.is_connected(decode.incarnation)
            if is_peer and (count := self._num_in_flight(worker, decode)):
                raise RuleBroken(f"H10: {worker.name} leaves with {count} writes to {decode.name} in flight")

    def _num_in_flight(self, worker: Watched, decode: Watched) -> int:
        """Writes of one worker to another under the keys of its session; 0 when that is over."""
        session = receiver_of(decode)._sessions.get(worker.incarnation)
        exposed = session.exposures if session is not None and not session.lost else []
        exposures = {id(found): found for one in exposed if (found := self._exposures.get(one.slices[0].keys[0]))}
        return sum(exposure.num_in_flight for exposure in exposures.values())

    # At the end

    def leftovers(self, worker: Watched) -> list[str]:
        """H7: what a worker still holds of any request; nothing at idle."""
        core = worker.core
        exposed = {id(exposure) for exposure in self._exposures.values() if exposure.owner is worker.fabric.inbox}
        counts = {
            "armed pushes": worker.fabric.stats().num_armed_pushes,
            "sequences": sum(rank.scheduler.num_running + rank.scheduler.num_waiting for rank in core.ranks),
            "pages": sum(rank.pool.num_pages - rank.pool.num_free for rank in core.ranks),
            "requests": sum(decode.num_open + decode.num_pending for decode in core.decodes),
            "choices": sum(len(decode.owners) for decode in core.decodes),
        }
        if core.receiver is not None:
            counts["handoffs"] = core.receiver.num_open
            counts["immediates"] = len(core.receiver.used_immediates)
            counts["tail slots"] = sum(len(core.receiver.used_tail_slots(rank.dp_rank)) for rank in core.ranks)
            sessions = core.receiver.sessions
            counts["sessions that are not fenced"] = len(sessions) - core.receiver.num_peers
            counts["keys that nobody was to have"] = len(exposed) - num_regions(worker) * len(sessions)
        if core.sender is not None and core.prefill is not None:
            counts["handoffs"] = core.prefill.num_open + core.sender.num_open
            counts["held sequences"] = len(core.prefill.held)
            counts["tail slots"] = len(core.prefill.used_tail_slots)
        return [f"{count} {noun} of {worker.name}" for noun, count in counts.items() if count]

    def _count(self, worker: Watched, grant: Grant, num_bytes: int) -> None:
        key = (grant.sender, grant.handoff_id)
        self._num_landed_bytes[key] += num_bytes
        if self._num_landed_bytes[key] > whole_bytes(worker, grant):
            raise RuleBroken(f"H3: something of handoff {grant.handoff_id} was written twice", about=grant.request_id)


def whole_bytes(worker: Watched, grant: Grant) -> int:
    """What a handoff writes: its pages in each layer of each rank, and of the drafter, and the tail."""
    info = worker.engines[grant.dp_rank].info
    page_bytes = info.sharding.num_ranks * info.sharding.rank_layout.page_bytes * info.sharding.layout.num_layers
    if info.draft_layout is not None:
        page_bytes += info.draft_layout.page_bytes * info.draft_layout.num_layers
    return len(grant.page_indices) * page_bytes + TAIL_BYTES


def num_regions(worker: Watched) -> int:
    """That a decode worker exposes to each peer: KV, the drafter's, and tails."""
    return sum(len(engine.ranks) + (engine.drafter is not None) + 1 for engine in worker.engines)


def require_kv(worker: Watched, dp_rank: int, token_ids: Tokens, page_indices: tuple[int, ...], *, about: str) -> None:
    """H1, on every rank, and in the drafter's cache."""
    engine = worker.engines[dp_rank]
    for index, kv in enumerate(engine.ranks):
        for head in kv.heads:
            if kv.read(page_indices, len(token_ids), head=head) != reference_kv(engine.model.layout, head, token_ids):
                raise RuleBroken(
                    f"H1: the KV of {len(token_ids)} tokens is wrong on rank {index} of {worker.name}", about=about
                )
    if engine.drafter is not None:
        read = engine.drafter.kv.read(page_indices, max(len(token_ids) - 1, 0), head=0)
        if read != reference_draft_kv(engine.model, token_ids):
            raise RuleBroken(
                f"H1: the KV of {len(token_ids)} tokens is wrong in the drafter of {worker.name}", about=about
            )


def receiver_of(worker: Watched) -> Receiver:
    receiver = worker.core.receiver
    if receiver is None:
        raise RuleBroken(f"H4: {worker.name} has no decode role, but was written to")
    return receiver


def handoffs_of(worker: Watched, dp_rank: int) -> tuple[IncomingHandoff, ...]:
    """Those that hold pages of one data parallel rank."""
    return tuple(handoff for handoff in receiver_of(worker).handoffs if handoff.dp_rank == dp_rank)


def require_partition(worker: Watched, rank: RankCore) -> None:
    """H2, H3, H7: each page has as many owners as its pool counts, and a page of an open handoff has that one alone."""
    owners: Counter[int] = Counter()
    for placed in rank.scheduler.placed:
        owners.update(placed.sequence.page_indices)
    owners.update(copy.source for _, copy in rank.scheduler.copies)
    if rank.prefill is not None:
        for sequence in rank.prefill.held.values():
            owners.update(sequence.page_indices)
    if worker.core.receiver is not None:
        for handoff in handoffs_of(worker, rank.dp_rank):
            if any(owners[page_index] for page_index in handoff.page_indices):
                raise RuleBroken(
                    f"H2: a page of handoff {handoff.handoff_id} on {worker.name} has another owner",
                    about=handoff.request_id,
                )
            owners.update(handoff.page_indices)
    counted = rank.pool.num_owners
    wrong = {page: (owners[page], count) for page, count in enumerate(counted) if count != owners[page]}
    if wrong:
        raise RuleBroken(f"H2: pages {wrong} of {worker.name} (page: owners, counted by the pool)")
