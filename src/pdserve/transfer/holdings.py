"""What the two sides of the messenger hold, as who keeps a ledger reads it; only they change it."""

from collections.abc import Sequence, Set
from typing import Protocol

from pdserve.ids import HandoffId, Immediate, Incarnation, PageIndex, RequestId, TailSlot, WorkerId
from pdserve.transfer.handoff import ReceiverState, SenderState
from pdserve.wire.peer import Grant


class PeerSession(Protocol):
    """A peer that is connected; on the decode side also one that is lost, until it is fenced."""

    @property
    def worker_id(self) -> WorkerId: ...
    @property
    def incarnation(self) -> Incarnation: ...
    @property
    def handoffs(self) -> Set[HandoffId]: ...


class IncomingHandoff(Protocol):
    """One that is not closed on the decode side: it owns pages, tail slot and immediate."""

    @property
    def handoff_id(self) -> HandoffId: ...
    @property
    def request_id(self) -> RequestId: ...
    @property
    def dp_rank(self) -> int: ...
    @property
    def state(self) -> ReceiverState: ...
    @property
    def opened_ns(self) -> int: ...
    @property
    def page_indices(self) -> Sequence[PageIndex]: ...
    @property
    def tail_slot(self) -> TailSlot: ...
    @property
    def immediate(self) -> Immediate: ...


class OutgoingHandoff(Protocol):
    """One that is not closed on the prefill side; its pages and tail slot are in the books of the prefill role."""

    @property
    def key(self) -> tuple[Incarnation, HandoffId]: ...
    @property
    def session(self) -> PeerSession: ...
    @property
    def grant(self) -> Grant: ...
    @property
    def state(self) -> SenderState: ...
