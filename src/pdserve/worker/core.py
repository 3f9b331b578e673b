"""The roles of one worker over one scheduler and one page pool, as a single object that takes events and the time.

A worker is built from roles, never a role from a worker: a prefill worker has the prefill role; a decode worker and a
colocated one have the decode role, which prefills what nobody else does. Sans-IO: the step loop, the connections and
the clock are `process`'s.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import count

from pdserve.config.role import Role
from pdserve.config.worker import WorkerSettings
from pdserve.decode.request import Request
from pdserve.decode.role import DecodeLimits, DecodeRole
from pdserve.engine.port import EngineInfo
from pdserve.fabric.port import (
    ExpectationExpired,
    Fabric,
    FabricEvent,
    Fenced,
    FlushEnded,
    Landed,
    PushEnded,
    RegionId,
)
from pdserve.ids import Incarnation, PageIndex, SequenceId
from pdserve.kv.pages import PagePool
from pdserve.prefill.role import PrefillRole
from pdserve.schedule.batch import Batch, BatchResult
from pdserve.schedule.limits import ScheduleLimits
from pdserve.schedule.outcome import StepOutcome
from pdserve.schedule.scheduler import Scheduler
from pdserve.text.tokenizer import Tokenizer
from pdserve.transfer.identity import Identity, Outbox
from pdserve.transfer.receiver import Receiver, ReceiverLimits
from pdserve.transfer.sender import Sender
from pdserve.wire.cluster import Load


@dataclass(frozen=True, slots=True, kw_only=True)
class FabricRegions:
    """The engine's regions, registered."""

    kv: RegionId
    tail: RegionId


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What a core is given: what it is, what it computes with, and the ports through which it acts."""

    settings: WorkerSettings
    identity: Identity
    engine: EngineInfo
    tokenizer: Tokenizer
    fabric: Fabric
    regions: FabricRegions
    outbox: Outbox
    drop_peer: Callable[[Incarnation, str], None]
    """Closes the control connection to a peer and logs why; `peer_lost` follows."""
    on_prefilled: Callable[[Request, tuple[PageIndex, ...]], None] | None = None
    """Sees the pages of each prompt when they are whole: for verification."""


class WorkerCore:
    """Threads: one. `prefill` and `decode` are None where the worker does not have the role."""

    def __init__(self, around: Surroundings) -> None:
        self.identity = around.identity
        self.pool = PagePool(num_pages=around.engine.num_pages)
        self.scheduler = Scheduler(
            pool=self.pool, page_slots=around.engine.layout.page_slots, limits=schedule_limits(around.settings)
        )
        self._sequence_ids = count()
        self.prefill: PrefillRole | None = None
        self.decode: DecodeRole | None = None
        self.sender: Sender | None = None
        self.receiver: Receiver | None = None
        if around.settings.role is Role.PREFILL:
            self.sender = _sender(around)
            self.prefill = self._prefill_role(around, self.sender)
        else:
            self.receiver = _receiver(around, self.pool)
            self.decode = self._decode_role(around, self.receiver)

    def _prefill_role(self, around: Surroundings, sender: Sender) -> PrefillRole:
        return PrefillRole(
            incarnation=around.identity.incarnation,
            sender=sender,
            scheduler=self.scheduler,
            pool=self.pool,
            num_tail_slots=around.engine.num_tail_slots,
            outbox=around.outbox,
            new_sequence_id=self._new_sequence_id,
        )

    def _decode_role(self, around: Surroundings, receiver: Receiver) -> DecodeRole:
        return DecodeRole(
            incarnation=around.identity.incarnation,
            receiver=receiver,
            scheduler=self.scheduler,
            pool=self.pool,
            page_slots=around.engine.layout.page_slots,
            tokenizer=around.tokenizer,
            new_sequence_id=self._new_sequence_id,
            limits=DecodeLimits(max_model_len=around.engine.max_model_len),
            needs_prefill_worker=self.prefill is None,
            on_prefilled=around.on_prefilled,
        )

    def _new_sequence_id(self) -> SequenceId:
        return SequenceId(next(self._sequence_ids))

    def on_fabric_events(self, events: Iterable[FabricEvent], *, now_ns: int) -> None:
        for event in events:
            match event:
                case PushEnded() | FlushEnded():
                    if self.prefill is not None:
                        self.prefill.on_fabric_event(event, now_ns=now_ns)
                case Landed() | ExpectationExpired() | Fenced():
                    if self.receiver is not None:
                        self.receiver.on_fabric_event(event, now_ns=now_ns)
        self.advance(now_ns=now_ns)

    def advance(self, *, now_ns: int) -> None:
        """Let waiting requests use what the last event freed."""
        if self.decode is not None:
            self.decode.advance(now_ns=now_ns)

    def next_batch(self, *, now_ns: int) -> Batch | None:
        """The next pass, with its pushes armed; None when there is nothing to compute."""
        batch = self.scheduler.next_batch(now_ns)
        if batch is None:
            return None
        if self.prefill is not None:
            self.prefill.before_pass(batch, now_ns=now_ns)
        if self.decode is not None:
            self.decode.before_pass(batch, now_ns=now_ns)
        return batch

    def complete(self, batch: Batch, result: BatchResult, *, now_ns: int) -> StepOutcome:
        outcome = self.scheduler.complete(result)
        if self.prefill is not None:
            self.prefill.after_pass(batch, result, outcome, now_ns=now_ns)
        if self.decode is not None:
            self.decode.after_pass(outcome, now_ns=now_ns)
        return outcome

    def on_time(self, now_ns: int) -> None:
        if self.receiver is not None:
            self.receiver.on_time(now_ns)
        if self.decode is not None:
            self.decode.on_time(now_ns)

    def peer_lost(self, peer: Incarnation, *, now_ns: int) -> None:
        """A control connection ended; the peer may have been on either side."""
        if self.prefill is not None:
            self.prefill.peer_lost(peer, now_ns=now_ns)
        if self.receiver is not None:
            self.receiver.peer_lost(peer)
        self.advance(now_ns=now_ns)

    def load(self) -> Load:
        num_pending = self.decode.num_pending if self.decode is not None else 0
        num_pending_tokens = self.decode.num_pending_tokens if self.decode is not None else 0
        return Load(
            num_running=self.scheduler.num_running,
            num_waiting=self.scheduler.num_waiting + num_pending,
            num_waiting_tokens=self.scheduler.num_waiting_tokens + num_pending_tokens,
            num_free_pages=self.pool.num_free,
            num_pages=self.pool.num_pages,
            num_quarantined_pages=self.receiver.num_quarantined_pages if self.receiver is not None else 0,
            num_prefill_peers=self.receiver.num_peers if self.receiver is not None else 0,
        )


def schedule_limits(settings: WorkerSettings) -> ScheduleLimits:
    return ScheduleLimits(
        max_batch_tokens=settings.chunk_tokens,
        saturation_tokens=settings.saturation_tokens,
        max_running=settings.max_running,
        max_waiting=settings.max_waiting,
        ageing_tokens_per_s=settings.ageing_tokens_per_s,
    )


def _sender(around: Surroundings) -> Sender:
    return Sender(
        incarnation=around.identity.incarnation,
        layout=around.engine.layout,
        num_pages=around.engine.num_pages,
        tail_slot_bytes=around.engine.tail_slot_bytes,
        fabric=around.fabric,
        kv_region=around.regions.kv,
        tail_region=around.regions.tail,
        outbox=around.outbox,
        drop_peer=around.drop_peer,
    )


def _receiver(around: Surroundings, pool: PagePool) -> Receiver:
    return Receiver(
        incarnation=around.identity.incarnation,
        layout=around.engine.layout,
        pool=pool,
        fabric=around.fabric,
        kv_region=around.regions.kv,
        tail_region=around.regions.tail,
        num_tail_slots=around.engine.num_tail_slots,
        outbox=around.outbox,
        drop_peer=around.drop_peer,
        limits=ReceiverLimits(),
    )
