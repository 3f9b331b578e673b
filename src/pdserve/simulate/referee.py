"""The rules H1 to H7 as checks on workers, by what their books show and by what is in their pages."""

# pyright: reportPrivateUsage=false

from collections import Counter
from collections.abc import Mapping
from typing import Protocol

from pdserve.decode.request import Request
from pdserve.fabric.memory import MemoryFabric
from pdserve.fabric.memory_inbox import Exposure
from pdserve.ids import HandoffId, Incarnation, PageIndex
from pdserve.simulate.engine import HashEngine
from pdserve.simulate.model import LAYOUT, SLOT_BYTES, TAIL_BYTES, reference_kv, tail_of
from pdserve.transfer.handoff import SenderState
from pdserve.transfer.holdings import IncomingHandoff
from pdserve.transfer.receiver import Receiver
from pdserve.transfer.sender import Sender
from pdserve.wire.peer import Grant
from pdserve.worker.audit import audit
from pdserve.worker.core import WorkerCore

NUM_REGIONS = 2
"""That a decode worker exposes to each peer: KV and tails."""


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
    def engine(self) -> HashEngine: ...
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
        worker.engine.kv_writes.on_write = lambda start, stop: self._kv_written(worker, start, stop)
        worker.engine.tail_writes.on_write = lambda start, stop: self._tail_written(worker, start, stop)

    def died(self, worker: Watched) -> None:
        del self._alive[worker.incarnation]

    def granted(self, grant: Grant) -> None:
        self.grants[grant.sender, grant.handoff_id] = grant

    # As things happen

    def _kv_written(self, worker: Watched, start: int, stop: int) -> None:
        """A remote write reached a KV region: its page must be granted (H2), its bytes right (H1, H3)."""
        layer_index, in_layer = divmod(start, LAYOUT.layer_bytes(worker.engine.info.num_pages))
        page_index, in_page = divmod(in_layer, LAYOUT.page_bytes)
        handoff = next((h for h in handoffs_of(worker) if page_index in h.page_indices), None)
        if handoff is None:
            raise RuleBroken(f"H2: a write landed on page {page_index} of {worker.name}, which no open handoff has")
        grant = self.grants[worker.incarnation, handoff.handoff_id]
        if in_page or stop - start != LAYOUT.page_bytes:
            raise RuleBroken(f"H2: a write of {stop - start} bytes at {start} is no page", about=grant.request_id)
        position = grant.page_indices.index(page_index) * LAYOUT.page_slots
        num_tokens = min(LAYOUT.page_slots, len(grant.token_ids) - 1 - position)
        wanted = reference_kv(grant.token_ids[:-1])[layer_index][position * SLOT_BYTES :][: num_tokens * SLOT_BYTES]
        if worker.engine.kv_region.buffer[start : start + len(wanted)] != wanted:
            raise RuleBroken(
                f"H3: wrong bytes landed in page {page_index} of {worker.name}, layer {layer_index}",
                about=grant.request_id,
            )
        self._count(grant, stop - start)

    def _tail_written(self, worker: Watched, start: int, stop: int) -> None:
        tail_slot = start // TAIL_BYTES
        handoff = next((h for h in handoffs_of(worker) if h.tail_slot == tail_slot), None)
        if handoff is None:
            raise RuleBroken(f"H2: a tail landed in slot {tail_slot} of {worker.name}, which no open handoff has")
        grant = self.grants[worker.incarnation, handoff.handoff_id]
        wanted = tail_of(reference_kv(grant.token_ids[:-1])[-1][-SLOT_BYTES:])
        if worker.engine.tail_region.buffer[start:stop] != wanted:
            raise RuleBroken(f"H3: a wrong tail landed in slot {tail_slot}", about=grant.request_id)
        self._count(grant, stop - start)

    def prefilled(self, worker: Watched, request: Request, page_indices: tuple[PageIndex, ...]) -> None:
        """H1: the KV of a prompt is whole when its request begins to be decoded."""
        computed = request.generate.prompt_token_ids[:-1]
        if worker.engine.read(page_indices, len(computed)) != reference_kv(computed):
            raise RuleBroken(
                f"H1: the KV of {len(computed)} tokens is wrong on {worker.name}", about=request.request_id
            )

    def after_event(self, worker: Watched) -> None:
        """What must always hold of the worker to which something happened."""
        require_partition(worker)
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
            has_landed = self._num_landed_bytes[key] == whole_bytes(handoff.grant)
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
        core, (rank,) = worker.core, worker.core.ranks
        exposed = {id(exposure) for exposure in self._exposures.values() if exposure.owner is worker.fabric.inbox}
        counts = {
            "armed pushes": worker.fabric.stats().num_armed_pushes,
            "sequences": rank.scheduler.num_running + rank.scheduler.num_waiting,
            "pages": rank.pool.num_pages - rank.pool.num_free,
        }
        if rank.decode is not None:
            counts["requests"] = rank.decode.num_open + rank.decode.num_pending
            counts["choices"] = len(rank.decode.owners)
        if core.receiver is not None:
            counts["handoffs"] = core.receiver.num_open
            counts["immediates"] = len(core.receiver.used_immediates)
            counts["tail slots"] = len(core.receiver.used_tail_slots(0))
            sessions = core.receiver.sessions
            counts["sessions that are not fenced"] = len(sessions) - core.receiver.num_peers
            counts["keys that nobody was to have"] = len(exposed) - NUM_REGIONS * len(sessions)
        if core.sender is not None and core.prefill is not None:
            counts["handoffs"] = core.prefill.num_open + core.sender.num_open
            counts["held sequences"] = len(core.prefill.held)
            counts["tail slots"] = len(core.prefill.used_tail_slots)
        return [f"{count} {noun} of {worker.name}" for noun, count in counts.items() if count]

    def _count(self, grant: Grant, num_bytes: int) -> None:
        key = (grant.sender, grant.handoff_id)
        self._num_landed_bytes[key] += num_bytes
        if self._num_landed_bytes[key] > whole_bytes(grant):
            raise RuleBroken(f"H3: something of handoff {grant.handoff_id} was written twice", about=grant.request_id)


def whole_bytes(grant: Grant) -> int:
    """What a handoff writes: its pages in each layer, and the tail."""
    return len(grant.page_indices) * LAYOUT.page_bytes * LAYOUT.num_layers + TAIL_BYTES


def receiver_of(worker: Watched) -> Receiver:
    receiver = worker.core.receiver
    if receiver is None:
        raise RuleBroken(f"H4: {worker.name} has no decode role, but was written to")
    return receiver


def handoffs_of(worker: Watched) -> tuple[IncomingHandoff, ...]:
    return receiver_of(worker).handoffs


def require_partition(worker: Watched) -> None:
    """H2, H3, H7: each page has as many owners as its pool counts, and a page of an open handoff has that one alone."""
    (rank,) = worker.core.ranks
    owners: Counter[int] = Counter()
    for placed in rank.scheduler.placed:
        owners.update(placed.sequence.page_indices)
    owners.update(copy.source for _, copy in rank.scheduler.copies)
    if rank.prefill is not None:
        for sequence in rank.prefill.held.values():
            owners.update(sequence.page_indices)
    if worker.core.receiver is not None:
        for handoff in worker.core.receiver.handoffs:
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
