"""The prefill role of a worker: turns grants into prefill-only sequences and their passes into pushes. Sans-IO."""

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

from pdserve.errors import CapacityError, ContextOverflow, FabricError
from pdserve.fabric.port import FlushEnded, PushEnded
from pdserve.ids import Incarnation, SequenceId, TailSlot
from pdserve.kv.pages import PagePool
from pdserve.schedule.batch import Batch, BatchResult
from pdserve.schedule.outcome import StepOutcome
from pdserve.schedule.scheduler import Scheduler
from pdserve.schedule.sequence import Sequence
from pdserve.telemetry.instants import Instant, RequestInstants
from pdserve.transfer.identity import Outbox
from pdserve.transfer.immediates import SlotPool
from pdserve.transfer.pushed import PushedLayers
from pdserve.transfer.sender import HandoffKey, Sender
from pdserve.wire.peer import Cancel, Grant, GrantRefused

DRAINING_RETRY_AFTER_S = 10.0
"""A successor, which has another incarnation, may be there after about this."""


class PrefillRole:
    """Threads: one. The worker calls `before_pass` and `after_pass` around each pass of the engine.

    Ownership of pages and tail slot of a handoff: the scheduler's while its sequence is scheduled, then this role's,
    and the pool's again once the sender has closed the handoff (rule H3).
    """

    def __init__(
        self,
        *,
        incarnation: Incarnation,
        sender: Sender,
        scheduler: Scheduler,
        pool: PagePool,
        num_tail_slots: int,
        outbox: Outbox,
        new_sequence_id: Callable[[], SequenceId],
    ) -> None:
        self._incarnation = incarnation
        self._sender = sender
        self._scheduler = scheduler
        self._pool = pool
        self._tail_slots = SlotPool(num_slots=num_tail_slots, noun="tail slot")
        self._outbox = outbox
        self._new_sequence_id = new_sequence_id
        self._keys: dict[SequenceId, HandoffKey] = {}
        self._sequence_ids: dict[HandoffKey, SequenceId] = {}
        self._held: dict[HandoffKey, Sequence] = {}
        self._instants: dict[HandoffKey, RequestInstants] = {}
        self._pushed: list[PushedLayers] = []
        self._ended: list[tuple[Grant, RequestInstants]] = []
        self.num_refused = 0
        self.is_draining = False
        """Refuse every new grant: the worker finishes what it has, and then it stops."""

    @property
    def num_open(self) -> int:
        """Handoffs that hold anything here; 0 at idle (rule H7)."""
        return len(self._sequence_ids)

    @property
    def sequence_ids(self) -> Mapping[HandoffKey, SequenceId]:
        """Of open handoffs: each is in the scheduler or in `held`."""
        return MappingProxyType(self._sequence_ids)

    @property
    def held(self) -> Mapping[HandoffKey, Sequence]:
        """Sequences that left the schedule and whose pages may still be read by writes."""
        return MappingProxyType(self._held)

    @property
    def used_tail_slots(self) -> frozenset[TailSlot]:
        return frozenset(map(TailSlot, self._tail_slots.used))

    def on_grant(self, peer: Incarnation, grant: Grant, *, now_ns: int) -> None:
        """Admit a grant, or refuse it with a time to come back. Raises: `RemoteProtocolError` when it is malformed."""
        key = self._sender.admit(peer, grant)
        if key is None:
            return
        try:
            self._schedule(key, grant, now_ns=now_ns)
        except (CapacityError, ContextOverflow) as error:
            self._sender.discard(key)
            self.num_refused += 1
            retry_after_s = error.retry_after_s if isinstance(error, CapacityError) else math.inf
            refusal = GrantRefused(
                sender=self._incarnation,
                receiver=peer,
                handoff_id=grant.handoff_id,
                message=error.message,
                retry_after_s=retry_after_s,
            )
            self._outbox.send(peer, refusal)

    def on_cancel(self, peer: Incarnation, cancel: Cancel, *, now_ns: int) -> None:
        key = (peer, cancel.handoff_id)
        if self._sender.cancel(key, cancel, now_ns=now_ns):
            self._withdraw(key, now_ns=now_ns)
        self._free_closed()

    def peer_lost(self, peer: Incarnation, *, now_ns: int) -> None:
        for key in self._sender.peer_lost(peer):
            self._withdraw(key, now_ns=now_ns)
        self._free_closed()

    def before_pass(self, batch: Batch, *, now_ns: int) -> None:
        """Arm what the batch's chunks make possible, so that the first layer's writes wait for its tick alone."""
        for chunk in batch.chunks:
            key = self._keys.get(chunk.sequence_id)
            if key is None:
                continue
            try:
                self._sender.arm(
                    key,
                    pass_index=batch.pass_index,
                    start=chunk.start,
                    stop=chunk.stop,
                    page_indices=chunk.page_indices,
                    tail_slot=None if chunk.tail_slot is None else TailSlot(chunk.tail_slot),
                )
            except (FabricError, CapacityError) as error:
                if self._sender.fail(key, error.message):
                    self._withdraw(key, now_ns=now_ns)

    def after_pass(self, batch: Batch, result: BatchResult, outcome: StepOutcome, *, now_ns: int) -> None:
        for sequence in [*outcome.prefilled, *outcome.removed]:
            key = self._keys.get(sequence.sequence_id)
            if key is not None:
                self._held[key] = sequence
        for chunk in batch.chunks:
            key = self._keys.get(chunk.sequence_id)
            if key is not None:
                self._mark_pass(key, result)
                self._sender.pass_ended(key, now_ns=now_ns)
        self._free_closed()

    def on_fabric_event(self, event: PushEnded | FlushEnded, *, now_ns: int) -> None:
        match event:
            case PushEnded():
                failed = self._sender.on_push_ended(event, now_ns=now_ns)
                if failed is not None:
                    self._withdraw(failed, now_ns=now_ns)
                self._mark_pushes()
            case FlushEnded():
                self._sender.on_flush_ended(event)
        self._free_closed()

    def grant_of(self, sequence_id: SequenceId) -> Grant | None:
        """The grant that a sequence in a batch belongs to, if it is one of ours."""
        key = self._keys.get(sequence_id)
        return None if key is None else self._sender.grant_of(key)

    def take_pushed(self) -> list[PushedLayers]:
        """The pushes of traced handoffs that ended since the last call."""
        pushed, self._pushed = self._pushed, []
        return pushed

    def take_ended(self) -> list[tuple[Grant, RequestInstants]]:
        """Handoffs that ended, however, since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def _schedule(self, key: HandoffKey, grant: Grant, *, now_ns: int) -> None:
        """Raises: `CapacityError`, `ContextOverflow`; nothing is held then."""
        if self.is_draining:
            raise CapacityError("this prefill worker drains and will stop", retry_after_s=DRAINING_RETRY_AFTER_S)
        tail_slot = self._tail_slots.allocate()
        sequence = Sequence(
            sequence_id=self._new_sequence_id(),
            token_ids=list(grant.token_ids),
            num_prompt_tokens=len(grant.token_ids),
            arrival_ns=now_ns,
            sampling=None,
            tail_slot=tail_slot,
        )
        try:
            self._scheduler.add(sequence)
        except (CapacityError, ContextOverflow):
            self._tail_slots.release(tail_slot)
            raise
        self._keys[sequence.sequence_id] = key
        self._sequence_ids[key] = sequence.sequence_id
        self._instants[key] = RequestInstants().at(Instant.ADMITTED, now_ns)

    def _withdraw(self, key: HandoffKey, *, now_ns: int) -> None:
        """Take the sequence out of the schedule, at once or when the running pass ends."""
        if key in self._held:
            return
        sequence = self._scheduler.remove(self._sequence_ids[key])
        if sequence is not None:
            self._held[key] = sequence
            self._sender.withdrawn(key, now_ns=now_ns)

    def _mark_pass(self, key: HandoffKey, result: BatchResult) -> None:
        instants = self._instants[key]
        if Instant.PREFILL_STARTED not in instants.times_ns:
            instants = instants.at(Instant.PREFILL_STARTED, result.started_ns)
        self._instants[key] = instants.at(Instant.PREFILL_ENDED, result.ended_ns)

    def _mark_pushes(self) -> None:
        for pushed in self._sender.take_pushed():
            key = (pushed.grant.sender, pushed.grant.handoff_id)
            completed_ns = max(layer.completed_ns for layer in pushed.layers)
            drained_ns = max(completed_ns, self._instants[key].times_ns.get(Instant.DRAINED, 0))
            self._instants[key] = self._instants[key].at(Instant.DRAINED, drained_ns)
            if pushed.grant.traced:
                self._pushed.append(pushed)

    def _free_closed(self) -> None:
        for key, grant in self._sender.take_closed():
            self._ended.append((grant, self._instants.pop(key)))
            sequence = self._held.pop(key)
            self._pool.release(sequence.page_indices)
            if sequence.tail_slot is not None:
                self._tail_slots.release(sequence.tail_slot)
            del self._keys[sequence.sequence_id]
            del self._sequence_ids[key]
