"""The prefill side of all handoffs: arms writes before each pass, drains, confirms, and gives pages back after that.

Rules by construction: H3 (source pages leave on entering CLOSED alone), H4 (stale messages are counted and dropped).
The caller owns the sequences; a handoff is closed only after the caller said that no pass fills its pages (`withdrawn`,
or the last chunk's pass, which `pass_ended` reports).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

from pdserve.errors import InternalError, RemoteProtocolError
from pdserve.fabric.port import (
    Fabric,
    FabricPeerId,
    FlushEnded,
    FlushId,
    PagePush,
    PushEnded,
    PushId,
    PushOutcome,
    SingleWrite,
)
from pdserve.ids import HandoffId, Incarnation, TailSlot, WorkerId
from pdserve.layer_counter import first_tick, ticks_per_pass
from pdserve.transfer.grant import contradiction
from pdserve.transfer.handoff import SenderEvent, SenderState, advance_sender
from pdserve.transfer.holdings import OutgoingHandoff, PeerSession
from pdserve.transfer.identity import Outbox
from pdserve.transfer.limits import FLUSH_TIMEOUT_S, MAX_FLUSHES
from pdserve.transfer.plan import RankPair, draft_pages_completed, pages_completed, rank_pairs
from pdserve.transfer.pushed import PushedLayers, pushed_layers
from pdserve.transfer.source import Source
from pdserve.transfer.target import Target, attach_targets
from pdserve.units import seconds_to_ns
from pdserve.wire.peer import Addressed, Grant, HandoffStopped, PeerHello

HandoffKey = tuple[Incarnation, HandoffId]


@dataclass(slots=True, kw_only=True)
class _Session:
    """One connected decode worker and its regions."""

    worker_id: WorkerId
    incarnation: Incarnation
    targets: tuple[Target, ...]
    """By data parallel rank; at least one."""
    handoffs: set[HandoffId] = field(default_factory=set[HandoffId])

    @property
    def peer_id(self) -> FabricPeerId:
        return self.targets[0].peer_id


@dataclass(slots=True, kw_only=True)
class _Handoff:
    key: HandoffKey
    session: _Session
    grant: Grant
    state: SenderState = SenderState.QUEUED
    in_pass: bool = False
    """A pass that fills its pages runs now."""
    target: Target
    pairs: tuple[RankPair, ...]
    outstanding: dict[PushId, PagePush | SingleWrite] = field(default_factory=dict[PushId, PagePush | SingleWrite])
    """Armed pushes that have not ended."""
    reason: str = "cancelled"


class Sender:
    """Threads: one. Closed handoffs are taken with `take_closed`; their pages and tail slots are the caller's again."""

    def __init__(
        self,
        *,
        incarnation: Incarnation,
        source: Source,
        fabric: Fabric,
        outbox: Outbox,
        drop_peer: Callable[[Incarnation, str], None],
    ) -> None:
        """`drop_peer(incarnation, why)` closes the control connection; `peer_lost` must follow."""
        self._incarnation = incarnation
        self._source = source
        self._fabric = fabric
        self._outbox = outbox
        self._drop_peer = drop_peer
        self._sessions: dict[Incarnation, _Session] = {}
        self._handoffs: dict[HandoffKey, _Handoff] = {}
        self._by_push: dict[PushId, _Handoff] = {}
        self._flushes: dict[FlushId, tuple[_Session, HandoffId | None]] = {}
        self._push_ids = map(PushId, count(1))
        self._next_flush_id = 1
        self._closed: list[tuple[HandoffKey, Grant]] = []
        self._pushed: list[PushedLayers] = []
        self.num_stale_messages = 0

    # Peers

    def peer_joined(self, hello: PeerHello) -> None:
        """Requires: `not is_connected`, a handshake without `difference`.

        Raises: `RemoteProtocolError` (no usable regions), `FabricError` (address or regions malformed).
        """
        if self.is_connected(hello.incarnation):
            raise InternalError(f"peer {hello.worker_id} joined again before its last session was lost")
        self._sessions[hello.incarnation] = _Session(
            worker_id=hello.worker_id,
            incarnation=hello.incarnation,
            targets=attach_targets(self._fabric, hello, tail_slot_bytes=self._source.tail_slot_bytes),
        )

    def peer_lost(self, incarnation: Incarnation) -> list[HandoffKey]:
        """Abandons the peer's handoffs; the caller takes their sequences out of the schedule and says `withdrawn`."""
        session = self._sessions.pop(incarnation, None)
        if session is None:
            return []
        keys = [(incarnation, handoff_id) for handoff_id in sorted(session.handoffs)]
        for key in keys:
            handoff = self._handoffs[key]
            self._cancel_pushes(handoff)
            self._apply(handoff, SenderEvent.PEER_LOST)
        self._fabric.disconnect(session.peer_id)
        return [key for key in keys if key in self._handoffs]

    def is_connected(self, incarnation: Incarnation) -> bool:
        return incarnation in self._sessions

    # Handoffs

    def admit(self, peer: Incarnation, grant: Grant) -> HandoffKey | None:
        """A checked grant, in state QUEUED; None when it is of another incarnation.

        Raises: `RemoteProtocolError` when the grant contradicts itself or the handshake.
        """
        if not self._is_current(peer, grant):
            self.num_stale_messages += 1
            return None
        session = self._sessions[peer]
        self._check(session, grant)
        key = (peer, grant.handoff_id)
        target = session.targets[grant.dp_rank]
        pairs = rank_pairs(self._source.sharding, target.sharding, handoff_id=grant.handoff_id)
        self._handoffs[key] = _Handoff(key=key, session=session, grant=grant, target=target, pairs=pairs)
        session.handoffs.add(grant.handoff_id)
        return key

    def discard(self, key: HandoffKey) -> None:
        """Forget a handoff that was admitted and then refused: nothing was armed."""
        handoff = self._handoffs.pop(key)
        handoff.session.handoffs.discard(key[1])

    def arm(
        self,
        key: HandoffKey,
        *,
        pass_index: int,
        start: int,
        stop: int,
        page_indices: tuple[int, ...],
        tail_slot: TailSlot | None,
    ) -> None:
        """Arm the writes that a chunk of tokens `[start, stop)` makes possible; call before its pass runs.

        `tail_slot` is given with the last chunk, and only then.
        Raises: `FabricError`, `CapacityError`: the caller must then `fail` the handoff.
        """
        handoff = self._handoffs[key]
        handoff.in_pass = True
        if handoff.state not in (SenderState.QUEUED, SenderState.PUSHING):
            return
        self._apply(handoff, SenderEvent.ARM if tail_slot is None else SenderEvent.SEAL)
        layout, num_layers = self._source.sharding.layout, self._source.num_counted_layers
        tick = first_tick(pass_index=pass_index, num_layers=num_layers)
        is_last = tail_slot is not None
        whole = pages_completed(start=start, stop=stop, is_last=is_last, page_slots=layout.page_slots)
        self._arm_pages(handoff, whole, page_indices, tick=tick)
        whole = draft_pages_completed(start=start, stop=stop, is_last=is_last, page_slots=layout.page_slots)
        self._arm_draft_pages(handoff, whole, page_indices, tick=tick + layout.num_layers)
        if tail_slot is not None:
            self._arm_tail(handoff, tail_slot, tick=tick + ticks_per_pass(num_layers))

    def pass_ended(self, key: HandoffKey, *, now_ns: int) -> None:
        """The pass of the last `arm` is over. Every pass that was armed is reported."""
        handoff = self._handoffs.get(key)
        if handoff is not None:
            handoff.in_pass = False
            self._drain(handoff, now_ns=now_ns)

    def withdrawn(self, key: HandoffKey, *, now_ns: int) -> None:
        """The caller took the sequence out of the schedule: no pass fills its pages now or later."""
        self.pass_ended(key, now_ns=now_ns)

    def cancel(self, key: HandoffKey, message: Addressed, *, now_ns: int) -> bool:
        """Start to stop a handoff; true when the caller must take its sequence out of the schedule.

        A cancel of a handoff that is closed already is confirmed too, after a flush: local completion proved nothing.
        """
        peer, handoff_id = key
        if not self._is_current(peer, message):
            self.num_stale_messages += 1
            return False
        handoff = self._handoffs.get(key)
        if handoff is None:
            self._flush(self._sessions[peer], handoff_id, now_ns=now_ns)
            return False
        return self._stop(handoff, SenderEvent.CANCEL, "cancelled")

    def fail(self, key: HandoffKey, reason: str) -> bool:
        """Stop a handoff for a reason of ours; true when the caller must take its sequence out of the schedule."""
        handoff = self._handoffs.get(key)
        return handoff is not None and self._stop(handoff, SenderEvent.CANCEL, reason)

    def on_push_ended(self, event: PushEnded, *, now_ns: int) -> HandoffKey | None:
        """Count a push; returns a handoff that failed by it: the caller must take its sequence out of the schedule."""
        handoff = self._by_push.pop(event.push_id, None)
        if handoff is None:
            return None
        push = handoff.outstanding.pop(event.push_id)
        self._pushed.append(pushed_layers(handoff.grant, push, event, num_layers=self._source.num_counted_layers))
        must_withdraw = event.outcome is PushOutcome.FAILED and self._stop(
            handoff, SenderEvent.PUSH_FAILED, f"a write failed with errno {event.errno}"
        )
        self._drain(handoff, now_ns=now_ns)
        return handoff.key if must_withdraw else None

    def on_flush_ended(self, event: FlushEnded) -> None:
        session, handoff_id = self._flushes.pop(event.flush_id)
        if handoff_id is None:
            return
        peer = session.incarnation
        handoff = self._handoffs.get((peer, handoff_id))
        reason = handoff.reason if handoff is not None else "it had been pushed whole"
        if handoff is not None:
            self._apply(handoff, SenderEvent.FLUSHED if event.delivered else SenderEvent.FLUSH_FAILED)
        if self._sessions.get(peer) is not session:  # lost; the peer may be back, with another session
            return
        if event.delivered:
            self._outbox.send(
                peer,
                HandoffStopped(sender=self._incarnation, receiver=peer, handoff_id=handoff_id, message=reason),
            )
        else:
            self._drop_peer(peer, f"the flush of handoff {handoff_id} failed with errno {event.errno}")

    def prove_delivery(self, *, now_ns: int) -> None:
        """Flush each peer: when `num_flushes` is 0, what was pushed before has landed, or its peer is out of reach."""
        for session in self._sessions.values():
            self._flush(session, None, now_ns=now_ns)

    @property
    def num_flushes(self) -> int:
        return len(self._flushes)

    def take_closed(self) -> list[tuple[HandoffKey, Grant]]:
        closed, self._closed = self._closed, []
        return closed

    def take_pushed(self) -> list[PushedLayers]:
        pushed, self._pushed = self._pushed, []
        return pushed

    def grant_of(self, key: HandoffKey) -> Grant | None:
        """None once the handoff is closed."""
        handoff = self._handoffs.get(key)
        return None if handoff is None else handoff.grant

    @property
    def num_open(self) -> int:
        return len(self._handoffs)

    @property
    def sessions(self) -> tuple[PeerSession, ...]:
        """Of decode workers that are connected."""
        return tuple(self._sessions.values())

    @property
    def handoffs(self) -> tuple[OutgoingHandoff, ...]:
        """Also those of peers that are lost."""
        return tuple(self._handoffs.values())

    # Inside

    def _is_current(self, peer: Incarnation, message: Addressed) -> bool:
        return message.receiver == self._incarnation and message.sender == peer and self.is_connected(peer)

    def _check(self, session: _Session, grant: Grant) -> None:
        problem = f"data parallel rank {grant.dp_rank} is outside [0, {len(session.targets)})"
        if 0 <= grant.dp_rank < len(session.targets):
            problem = contradiction(
                grant,
                page_slots=self._source.sharding.layout.page_slots,
                num_pages=session.targets[grant.dp_rank].num_pages,
                num_tail_slots=session.targets[grant.dp_rank].num_tail_slots,
            )
        if grant.handoff_id in session.handoffs:
            problem = "it was granted before"
        if problem is not None:
            raise RemoteProtocolError(f"grant {grant.handoff_id} is malformed: {problem}", peer=session.worker_id)

    def _arm_pages(self, handoff: _Handoff, positions: range, page_indices: tuple[int, ...], *, tick: int) -> None:
        source_pages, target_pages = self._pages_at(positions, handoff.grant, page_indices)
        if not source_pages:
            return
        pushes = self._source.page_pushes(
            handoff.target,
            handoff.pairs,
            push_ids=self._push_ids,
            immediate=handoff.grant.immediate,
            source_pages=source_pages,
            target_pages=target_pages,
            first_tick=tick,
        )
        for push in pushes:
            self._submit(handoff, push)

    def _arm_draft_pages(
        self, handoff: _Handoff, positions: range, page_indices: tuple[int, ...], *, tick: int
    ) -> None:
        source_pages, target_pages = self._pages_at(positions, handoff.grant, page_indices)
        if not source_pages or self._source.draft is None:
            return
        push = self._source.draft_push(
            handoff.target,
            push_id=next(self._push_ids),
            immediate=handoff.grant.immediate,
            source_pages=source_pages,
            target_pages=target_pages,
            first_tick=tick,
        )
        self._submit(handoff, push)

    def _pages_at(
        self, positions: range, grant: Grant, page_indices: tuple[int, ...]
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The sequence's pages at `positions`, ours and the granted ones, without those that the far side holds."""
        held_pages = grant.num_held_tokens // self._source.sharding.layout.page_slots
        start, stop = max(positions.start, held_pages), max(positions.stop, held_pages)
        return page_indices[start:stop], grant.page_indices[start - held_pages : stop - held_pages]

    def _arm_tail(self, handoff: _Handoff, tail_slot: TailSlot, *, tick: int) -> None:
        tail = self._source.tail_write(
            handoff.target,
            push_id=next(self._push_ids),
            immediate=handoff.grant.immediate,
            source_slot=tail_slot,
            target_slot=handoff.grant.tail_slot,
            tick=tick,
        )
        self._submit(handoff, tail)

    def _submit(self, handoff: _Handoff, push: PagePush | SingleWrite) -> None:
        self._fabric.arm(push)
        handoff.outstanding[push.push_id] = push
        self._by_push[push.push_id] = handoff

    def _cancel_pushes(self, handoff: _Handoff) -> None:
        for push_id in handoff.outstanding:
            self._fabric.cancel(push_id)

    def _stop(self, handoff: _Handoff, event: SenderEvent, reason: str) -> bool:
        if not self._apply(handoff, event):
            return False
        handoff.reason = reason
        self._cancel_pushes(handoff)
        return True

    def _drain(self, handoff: _Handoff, *, now_ns: int) -> None:
        if handoff.in_pass or handoff.outstanding:
            return
        if self._apply(handoff, SenderEvent.DRAINED) and handoff.state is SenderState.FLUSHING:
            self._flush(handoff.session, handoff.key[1], now_ns=now_ns)

    def _flush(self, session: _Session, handoff_id: HandoffId | None, *, now_ns: int) -> None:
        if len(self._flushes) >= MAX_FLUSHES:
            self._drop_peer(session.incarnation, f"{MAX_FLUSHES} flushes are under way: it cancels without end")
            return
        flush_id = FlushId(self._next_flush_id)
        self._next_flush_id += 1
        self._flushes[flush_id] = (session, handoff_id)
        deadline_ns = now_ns + seconds_to_ns(FLUSH_TIMEOUT_S)
        regions = tuple(region for target in session.targets for region in target.regions)
        self._fabric.flush(flush_id, session.peer_id, regions, deadline_ns=deadline_ns)

    def _apply(self, handoff: _Handoff, event: SenderEvent) -> bool:
        after = advance_sender(handoff.state, event, handoff=str(handoff.key))
        if after is None:
            return False
        handoff.state = after
        if after is SenderState.CLOSED:
            self._closed.append((handoff.key, handoff.grant))
            del self._handoffs[handoff.key]
            handoff.session.handoffs.discard(handoff.key[1])
        return True
