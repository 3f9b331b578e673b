"""The decode side of all handoffs: grants pages, counts what lands, keeps pages in quarantine until nobody may write.

Rules by construction: H1 (only `Landed` hands pages on), H2 (pages leave on entering CLOSED alone), H4 (a message of
another incarnation is counted and dropped), H5 (an immediate is forgotten, then released), H6 (bounds and deadlines).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pdserve.errors import CapacityError, FabricError, HandoffError, HandoffTimeout, InternalError, PeerLost
from pdserve.fabric.port import ExpectationExpired, Fabric, Fenced, Landed, RegionDescriptor
from pdserve.ids import HandoffId, Immediate, Incarnation, PageIndex, RequestId, TailSlot, WorkerId
from pdserve.kv.layout import KvLayout
from pdserve.kv.shard import KvSharding
from pdserve.transfer.destination import Destination, exposures_of
from pdserve.transfer.handoff import ReceiverEvent, ReceiverState, advance_receiver
from pdserve.transfer.holdings import IncomingHandoff, PeerSession
from pdserve.transfer.identity import Outbox
from pdserve.transfer.immediates import ImmediatePool
from pdserve.transfer.limits import ReceiverLimits
from pdserve.transfer.outcome import HandoffFailed, HandoffLanded, Outcome
from pdserve.transfer.plan import num_writes, pages_to_write
from pdserve.units import ns_to_seconds, seconds_to_ns
from pdserve.wire.peer import Addressed, Cancel, Grant, GrantRefused, HandoffStopped, RankRegions


@dataclass(slots=True, kw_only=True)
class _Session:
    """One connected prefill worker, and the exposures made for it alone."""

    worker_id: WorkerId
    incarnation: Incarnation
    sharding: KvSharding
    exposures: list[RegionDescriptor]
    lost: bool = False
    handoffs: set[HandoffId] = field(default_factory=set[HandoffId])


@dataclass(slots=True, kw_only=True)
class _Handoff:
    handoff_id: HandoffId
    request_id: RequestId
    peer: Incarnation
    dp_rank: int
    page_indices: list[PageIndex]
    immediate: Immediate
    tail_slot: TailSlot
    state: ReceiverState = ReceiverState.GRANTED
    opened_ns: int
    cancel_deadline_ns: int | None = None


class Receiver:
    """Threads: one. The caller feeds messages, fabric events and time, and takes outcomes with `take_outcomes`."""

    def __init__(
        self,
        *,
        incarnation: Incarnation,
        sharding: KvSharding,
        draft_layout: KvLayout | None = None,
        destinations: Sequence[Destination],
        fabric: Fabric,
        outbox: Outbox,
        drop_peer: Callable[[Incarnation, str], None],
        limits: ReceiverLimits,
    ) -> None:
        """`destinations` by data parallel rank, each sharded as `sharding`.

        `drop_peer(incarnation, why)` closes the control connection; `peer_lost` must follow.
        """
        self._incarnation = incarnation
        self._sharding = sharding
        self._draft_layout = draft_layout
        self._destinations = tuple(destinations)
        self._fabric = fabric
        self._outbox = outbox
        self._drop_peer = drop_peer
        self._limits = limits
        self._immediates = ImmediatePool(num_slots=limits.max_handoffs * len(self._destinations))
        self._sessions: dict[Incarnation, _Session] = {}
        self._handoffs: dict[HandoffId, _Handoff] = {}
        self._by_immediate: dict[Immediate, _Handoff] = {}
        self._next_handoff_id = 1
        self._outcomes: tuple[list[Outcome], ...] = tuple([] for _ in self._destinations)
        self.num_stale_messages = 0

    # Peers

    def expose(self) -> tuple[RankRegions, ...]:
        """All regions under keys for one peer; give them back with `peer_joined` or `withdraw`.

        Raises: `FabricError`; nothing is exposed then.
        """
        regions: list[RankRegions] = []
        try:
            for destination in self._destinations:
                regions.append(destination.expose(self._fabric))
        except FabricError:
            self.withdraw(tuple(regions))
            raise
        return tuple(regions)

    def withdraw(self, regions: tuple[RankRegions, ...]) -> None:
        """The handshake failed: nobody may use the keys."""
        for exposure in exposures_of(regions):
            self._fabric.fence(exposure)

    def peer_joined(
        self, *, worker_id: WorkerId, incarnation: Incarnation, sharding: KvSharding, regions: tuple[RankRegions, ...]
    ) -> None:
        """`sharding` is the peer's. Requires: `can_join(incarnation)`, a handshake without `difference`."""
        if not self.can_join(incarnation):
            raise InternalError(f"peer {worker_id} joined again before its last session was fenced")
        self._sessions[incarnation] = _Session(
            worker_id=worker_id, incarnation=incarnation, sharding=sharding, exposures=exposures_of(regions)
        )

    def peer_lost(self, incarnation: Incarnation) -> None:
        """Fences the peer; its handoffs fail now, their pages wait for the fence."""
        session = self._sessions.get(incarnation)
        if session is None or session.lost:
            return
        session.lost = True
        for exposure in session.exposures:
            self._fabric.fence(exposure)
        for handoff_id in sorted(session.handoffs):
            handoff = self._handoffs[handoff_id]
            error = PeerLost(
                "the prefill worker was lost during the handoff", peer=session.worker_id, request_id=handoff.request_id
            )
            self._apply(handoff, ReceiverEvent.PEER_LOST, error=error)

    def can_join(self, incarnation: Incarnation) -> bool:
        """False while a session of this incarnation is open or not fenced yet."""
        return incarnation not in self._sessions

    def is_connected(self, incarnation: Incarnation) -> bool:
        session = self._sessions.get(incarnation)
        return session is not None and not session.lost

    # Handoffs

    def open(
        self,
        *,
        request_id: RequestId,
        token_ids: tuple[int, ...],
        peer: Incarnation,
        dp_rank: int = 0,
        now_ns: int,
        timeout_s: float,
        traced: bool,
    ) -> HandoffId:
        """Take pages, immediate and tail slot, expect the writes, send the grant.

        Requires: at least two tokens, `is_connected(peer)`, `accepts_handoffs(dp_rank)`.
        Raises: `CapacityError` when something is short; nothing changed then.
        """
        session = self._sessions[peer]
        positions = pages_to_write(
            num_held_tokens=0, num_prompt_tokens=len(token_ids), page_slots=self._sharding.layout.page_slots
        )
        handoff = self._take(request_id, session, dp_rank, num_pages=len(positions), now_ns=now_ns)
        self._fabric.expect(
            handoff.immediate,
            self._num_writes(session, num_prompt_tokens=len(token_ids)),
            deadline_ns=now_ns + seconds_to_ns(timeout_s),
            record_arrivals=traced,
        )
        self._outbox.send(
            peer,
            Grant(
                sender=self._incarnation,
                receiver=peer,
                handoff_id=handoff.handoff_id,
                request_id=request_id,
                dp_rank=dp_rank,
                token_ids=token_ids,
                num_held_tokens=0,
                page_indices=tuple(handoff.page_indices),
                immediate=handoff.immediate,
                tail_slot=handoff.tail_slot,
                timeout_s=timeout_s,
                traced=traced,
            ),
        )
        return handoff.handoff_id

    def cancel(self, handoff_id: HandoffId, *, now_ns: int) -> None:
        """Nobody wants the request any more; the pages come back when the peer has confirmed."""
        handoff = self._handoffs.get(handoff_id)
        if handoff is not None:
            self._cancel(handoff, ReceiverEvent.CANCEL, now_ns=now_ns)

    def on_message(self, peer: Incarnation, message: GrantRefused | HandoffStopped, *, now_ns: int) -> None:
        """Apply a message that came over the connection of `peer`."""
        handoff = self._handoffs.get(message.handoff_id)
        if not self._is_current(peer, message) or (handoff is not None and handoff.peer != peer):
            self.num_stale_messages += 1
            return
        if handoff is None:  # it closed while the message was under way
            return
        elapsed_s = ns_to_seconds(now_ns - handoff.opened_ns)
        match message:
            case GrantRefused():
                error = CapacityError(message.message, retry_after_s=message.retry_after_s)
                self._apply(handoff, ReceiverEvent.REFUSED, error=error)
            case HandoffStopped():
                error = HandoffError(
                    f"the prefill worker stopped the handoff after {elapsed_s:.3f} s: {message.message}",
                    request_id=handoff.request_id,
                )
                self._apply(handoff, ReceiverEvent.STOPPED, error=error)

    def on_fabric_event(self, event: Landed | ExpectationExpired | Fenced, *, now_ns: int) -> None:
        match event:
            case Landed():
                handoff = self._by_immediate.get(event.immediate)
                if handoff is not None:
                    self._apply(handoff, ReceiverEvent.LANDED, landed=event)
            case ExpectationExpired():
                handoff = self._by_immediate.get(event.immediate)
                if handoff is not None:
                    error = HandoffTimeout(
                        f"{event.num_arrived} of {event.num_expected} writes arrived before the deadline",
                        request_id=handoff.request_id,
                    )
                    self._cancel(handoff, ReceiverEvent.EXPIRED, now_ns=now_ns, error=error)
            case Fenced():
                self._fenced(event.exposure)

    def on_time(self, now_ns: int) -> None:
        """Drop peers that do not confirm a cancel in time."""
        for handoff in list(self._handoffs.values()):
            deadline_ns = handoff.cancel_deadline_ns
            if deadline_ns is not None and now_ns >= deadline_ns and handoff.state is ReceiverState.CANCELLING:
                handoff.cancel_deadline_ns = None
                self._drop_peer(handoff.peer, f"no answer to the cancel of handoff {handoff.handoff_id}")

    def release_tail_slot(self, dp_rank: int, tail_slot: TailSlot) -> None:
        """Nobody reads the tail of a handoff that landed on the rank any more."""
        self._destinations[dp_rank].release_tail_slot(tail_slot)

    def take_outcomes(self, dp_rank: int = 0) -> list[Outcome]:
        """What became of the handoffs of one data parallel rank since the last call."""
        outcomes = self._outcomes[dp_rank][:]
        self._outcomes[dp_rank].clear()
        return outcomes

    # Figures

    def accepts_handoffs(self, dp_rank: int = 0) -> bool:
        """False while too much of the rank's pool is in quarantine; requests prefill locally then."""
        num_pages = self._destinations[dp_rank].pool.num_pages
        return self.num_quarantined_pages(dp_rank) <= self._limits.max_quarantined_share * num_pages

    @property
    def num_open(self) -> int:
        return len(self._handoffs)

    @property
    def num_peers(self) -> int:
        """Connected prefill workers."""
        return sum(not session.lost for session in self._sessions.values())

    def num_quarantined_pages(self, dp_rank: int = 0) -> int:
        """Pages of the rank that nobody wants, but somebody may still write to."""
        unwanted = (ReceiverState.CANCELLING, ReceiverState.QUARANTINED)
        return sum(
            len(handoff.page_indices)
            for handoff in self._handoffs.values()
            if handoff.state in unwanted and handoff.dp_rank == dp_rank
        )

    # What is held

    @property
    def sessions(self) -> tuple[PeerSession, ...]:
        """Of prefill workers that are connected, or lost and not fenced yet."""
        return tuple(self._sessions.values())

    @property
    def handoffs(self) -> tuple[IncomingHandoff, ...]:
        """Of all data parallel ranks."""
        return tuple(self._handoffs.values())

    def untaken(self, dp_rank: int) -> tuple[Outcome, ...]:
        """What the next `take_outcomes` gives: what landed has its pages and its tail slot."""
        return tuple(self._outcomes[dp_rank])

    def used_tail_slots(self, dp_rank: int) -> frozenset[TailSlot]:
        return self._destinations[dp_rank].used_tail_slots

    @property
    def used_immediates(self) -> frozenset[Immediate]:
        return self._immediates.used

    # Inside

    def _is_current(self, peer: Incarnation, message: Addressed) -> bool:
        return message.receiver == self._incarnation and message.sender == peer and self.is_connected(peer)

    def _num_writes(self, session: _Session, *, num_prompt_tokens: int) -> int:
        return num_writes(
            session.sharding,
            self._sharding,
            num_held_tokens=0,
            num_prompt_tokens=num_prompt_tokens,
            draft_layout=self._draft_layout,
        )

    def _take(self, request_id: RequestId, session: _Session, dp_rank: int, *, num_pages: int, now_ns: int) -> _Handoff:
        if not self._immediates.num_free:
            raise CapacityError(f"all {self._immediates.num_slots} immediates are in use", retry_after_s=1.0)
        page_indices, tail_slot = self._destinations[dp_rank].take(num_pages)
        handoff = _Handoff(
            handoff_id=HandoffId(self._next_handoff_id),
            request_id=request_id,
            peer=session.incarnation,
            dp_rank=dp_rank,
            page_indices=page_indices,
            immediate=self._immediates.allocate(),
            tail_slot=tail_slot,
            opened_ns=now_ns,
        )
        self._next_handoff_id += 1
        self._handoffs[handoff.handoff_id] = handoff
        self._by_immediate[handoff.immediate] = handoff
        session.handoffs.add(handoff.handoff_id)
        return handoff

    def _cancel(
        self, handoff: _Handoff, event: ReceiverEvent, *, now_ns: int, error: HandoffError | None = None
    ) -> None:
        if not self._apply(handoff, event, error=error):
            return
        handoff.cancel_deadline_ns = now_ns + seconds_to_ns(self._limits.cancel_timeout_s)
        self._outbox.send(
            handoff.peer, Cancel(sender=self._incarnation, receiver=handoff.peer, handoff_id=handoff.handoff_id)
        )

    def _apply(
        self,
        handoff: _Handoff,
        event: ReceiverEvent,
        *,
        landed: Landed | None = None,
        error: HandoffError | CapacityError | None = None,
    ) -> bool:
        """Move a handoff; true when it moved. A wanted handoff that can't land is reported once, with `error`."""
        before = handoff.state
        after = advance_receiver(before, event, handoff=str(handoff.handoff_id))
        if after is None:
            return False
        handoff.state = after
        delivers = before is ReceiverState.GRANTED and landed is not None
        if before is ReceiverState.GRANTED and error is not None:
            self._outcomes[handoff.dp_rank].append(
                HandoffFailed(request_id=handoff.request_id, handoff_id=handoff.handoff_id, error=error)
            )
        if after is ReceiverState.CLOSED:
            self._close(handoff, delivers=delivers)
        if delivers and landed is not None:
            self._outcomes[handoff.dp_rank].append(
                HandoffLanded(
                    request_id=handoff.request_id,
                    handoff_id=handoff.handoff_id,
                    page_indices=handoff.page_indices,
                    tail_slot=handoff.tail_slot,
                    landed=landed,
                )
            )
        return True

    def _close(self, handoff: _Handoff, *, delivers: bool) -> None:
        self._fabric.forget(handoff.immediate)
        self._immediates.release(handoff.immediate)
        if not delivers:
            destination = self._destinations[handoff.dp_rank]
            destination.release_tail_slot(handoff.tail_slot)
            destination.pool.release(handoff.page_indices)
        del self._handoffs[handoff.handoff_id]
        del self._by_immediate[handoff.immediate]
        session = self._sessions.get(handoff.peer)
        if session is None:
            raise InternalError(f"handoff {handoff.handoff_id} outlived the session of its peer")
        session.handoffs.remove(handoff.handoff_id)

    def _fenced(self, exposure: RegionDescriptor) -> None:
        for session in list(self._sessions.values()):
            if not session.lost or exposure not in session.exposures:
                continue
            session.exposures.remove(exposure)
            if session.exposures:
                return
            for handoff_id in sorted(session.handoffs):
                self._apply(self._handoffs[handoff_id], ReceiverEvent.FENCED)
            del self._sessions[session.incarnation]
            return
