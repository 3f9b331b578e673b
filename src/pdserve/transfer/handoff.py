"""The states of a handoff, one pure table for each side; `docs/handoff.md` draws them and a test compares.

Every (state, event) pair is decided: it moves, it is ignored (with the reason in the table's comments), or it is a bug
and raises. Invariants, cited by number in the code and the tests:

1. Receiver: pages, tail slot and immediate are taken before the first state. On entering CLOSED the immediate is freed;
   pages and tail slot are given on together (with 3), or freed.
2. Receiver: CLOSED is entered only when no write of the handoff is in flight or can still be posted (H2): all landed,
   the sender refused before posting, the sender confirmed after a flush, or the exposure is fenced.
3. Receiver: only GRANTED --LANDED--> makes a request schedulable (H1).
4. Sender: source pages and tail slot are given back on entering CLOSED, and CLOSED is entered only when no write is
   outstanding and no running pass fills the pages (H3).
5. Sender: HandoffStopped is sent exactly on FLUSHING --FLUSHED-->.
6. CLOSED is final on both sides.
"""

from collections.abc import Mapping
from enum import Enum
from typing import TypeVar

from pdserve.errors import InternalError


class ReceiverState(Enum):
    GRANTED = "granted"
    """The grant was sent; the peer may write."""
    CANCELLING = "cancelling"
    """Nobody wants the pages any more; the peer may still write until it confirms."""
    QUARANTINED = "quarantined"
    """The peer is lost; it may still write until it is fenced."""
    CLOSED = "closed"


class ReceiverEvent(Enum):
    LANDED = "landed"
    REFUSED = "refused"
    STOPPED = "stopped"
    CANCEL = "cancel"
    EXPIRED = "expired"
    PEER_LOST = "peer_lost"
    FENCED = "fenced"


class SenderState(Enum):
    QUEUED = "queued"
    """Admitted; no write is armed."""
    PUSHING = "pushing"
    """Some chunks are armed."""
    SEALED = "sealed"
    """The last chunk and the tail are armed."""
    STOPPING = "stopping"
    """Cancelled or failed; no more is armed, what is posted drains."""
    FLUSHING = "flushing"
    """Drained; a flush proves that nothing is in flight."""
    ABANDONED = "abandoned"
    """The peer is lost; what is posted drains or fails."""
    CLOSED = "closed"


class SenderEvent(Enum):
    ARM = "arm"
    SEAL = "seal"
    DRAINED = "drained"
    CANCEL = "cancel"
    PUSH_FAILED = "push_failed"
    PEER_LOST = "peer_lost"
    FLUSHED = "flushed"
    FLUSH_FAILED = "flush_failed"


class Decision(Enum):
    """What a pair does when it does not move."""

    IGNORE = "ignore"
    ILLEGAL = "illegal"


_R, _RE = ReceiverState, ReceiverEvent
_S, _SE = SenderState, SenderEvent
_IGNORE, _ILLEGAL = Decision.IGNORE, Decision.ILLEGAL

RECEIVER_TABLE: Mapping[ReceiverState, Mapping[ReceiverEvent, ReceiverState | Decision]] = {
    _R.GRANTED: {
        _RE.LANDED: _R.CLOSED,
        _RE.REFUSED: _R.CLOSED,
        _RE.STOPPED: _R.CLOSED,
        _RE.CANCEL: _R.CANCELLING,
        _RE.EXPIRED: _R.CANCELLING,
        _RE.PEER_LOST: _R.QUARANTINED,
        _RE.FENCED: _ILLEGAL,  # a fence begins with the loss of the peer
    },
    _R.CANCELLING: {
        _RE.LANDED: _R.CLOSED,  # everything arrived before the cancel did
        _RE.REFUSED: _R.CLOSED,  # the refusal crossed the cancel
        _RE.STOPPED: _R.CLOSED,
        _RE.CANCEL: _IGNORE,
        _RE.EXPIRED: _IGNORE,  # the receiver drops an unresponsive peer, which brings PEER_LOST
        _RE.PEER_LOST: _R.QUARANTINED,
        _RE.FENCED: _ILLEGAL,
    },
    _R.QUARANTINED: {
        _RE.LANDED: _R.CLOSED,  # the last write came before the fence: nothing is left to come
        _RE.REFUSED: _ILLEGAL,  # a lost peer's messages are not read
        _RE.STOPPED: _ILLEGAL,
        _RE.CANCEL: _IGNORE,
        _RE.EXPIRED: _IGNORE,
        _RE.PEER_LOST: _IGNORE,
        _RE.FENCED: _R.CLOSED,
    },
    _R.CLOSED: dict.fromkeys(_RE, _IGNORE),  # events that were under way when it closed
}

SENDER_TABLE: Mapping[SenderState, Mapping[SenderEvent, SenderState | Decision]] = {
    _S.QUEUED: {
        _SE.ARM: _S.PUSHING,
        _SE.SEAL: _S.SEALED,
        _SE.DRAINED: _IGNORE,
        _SE.CANCEL: _S.STOPPING,
        _SE.PUSH_FAILED: _ILLEGAL,
        _SE.PEER_LOST: _S.ABANDONED,
        _SE.FLUSHED: _ILLEGAL,
        _SE.FLUSH_FAILED: _ILLEGAL,
    },
    _S.PUSHING: {
        _SE.ARM: _S.PUSHING,
        _SE.SEAL: _S.SEALED,
        _SE.DRAINED: _IGNORE,  # between two chunks
        _SE.CANCEL: _S.STOPPING,
        _SE.PUSH_FAILED: _S.STOPPING,
        _SE.PEER_LOST: _S.ABANDONED,
        _SE.FLUSHED: _ILLEGAL,
        _SE.FLUSH_FAILED: _ILLEGAL,
    },
    _S.SEALED: {
        _SE.ARM: _ILLEGAL,
        _SE.SEAL: _ILLEGAL,
        _SE.DRAINED: _S.CLOSED,
        _SE.CANCEL: _S.STOPPING,
        _SE.PUSH_FAILED: _S.STOPPING,
        _SE.PEER_LOST: _S.ABANDONED,
        _SE.FLUSHED: _ILLEGAL,
        _SE.FLUSH_FAILED: _ILLEGAL,
    },
    _S.STOPPING: {
        _SE.ARM: _ILLEGAL,
        _SE.SEAL: _ILLEGAL,
        _SE.DRAINED: _S.FLUSHING,
        _SE.CANCEL: _IGNORE,
        _SE.PUSH_FAILED: _IGNORE,
        _SE.PEER_LOST: _S.ABANDONED,
        _SE.FLUSHED: _ILLEGAL,
        _SE.FLUSH_FAILED: _ILLEGAL,
    },
    _S.FLUSHING: {
        _SE.ARM: _ILLEGAL,
        _SE.SEAL: _ILLEGAL,
        _SE.DRAINED: _IGNORE,
        _SE.CANCEL: _IGNORE,
        _SE.PUSH_FAILED: _ILLEGAL,
        _SE.PEER_LOST: _S.CLOSED,  # drained already
        _SE.FLUSHED: _S.CLOSED,
        _SE.FLUSH_FAILED: _S.CLOSED,  # no confirmation: the peer is dropped and fences us
    },
    _S.ABANDONED: {
        _SE.ARM: _ILLEGAL,
        _SE.SEAL: _ILLEGAL,
        _SE.DRAINED: _S.CLOSED,
        _SE.CANCEL: _IGNORE,
        _SE.PUSH_FAILED: _IGNORE,
        _SE.PEER_LOST: _IGNORE,
        _SE.FLUSHED: _ILLEGAL,
        _SE.FLUSH_FAILED: _ILLEGAL,
    },
    _S.CLOSED: {
        **dict.fromkeys(_SE, _IGNORE),
        _SE.ARM: _ILLEGAL,
        _SE.SEAL: _ILLEGAL,
    },
}

State = TypeVar("State", ReceiverState, SenderState)
Event = TypeVar("Event", ReceiverEvent, SenderEvent)


def _advance(
    table: Mapping[State, Mapping[Event, State | Decision]], state: State, event: Event, handoff: str
) -> State | None:
    match table[state][event]:
        case Decision.IGNORE:
            return None
        case Decision.ILLEGAL:
            raise InternalError(f"handoff {handoff}: {event.name} in state {state.name} is impossible; this is a bug")
        case next_state:
            return next_state


def advance_receiver(state: ReceiverState, event: ReceiverEvent, *, handoff: str) -> ReceiverState | None:
    """The next state, or None when the event changes nothing. Raises: `InternalError` when the pair is impossible."""
    return _advance(RECEIVER_TABLE, state, event, handoff)


def advance_sender(state: SenderState, event: SenderEvent, *, handoff: str) -> SenderState | None:
    """As `advance_receiver`, for the prefill side."""
    return _advance(SENDER_TABLE, state, event, handoff)
