"""Who we are and what our KV cache looks like: what a handshake compares."""

from dataclasses import dataclass
from typing import Protocol

from pdserve.ids import Incarnation, WorkerId
from pdserve.kv.layout import KvLayout
from pdserve.wire.peer import Message, PeerHello


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """One worker's side of a handshake."""

    worker_id: WorkerId
    incarnation: Incarnation
    model_fingerprint: str
    layout: KvLayout
    num_pages: int
    tail_slot_bytes: int


class Outbox(Protocol):
    """Where a side puts its control messages. Never blocks; a peer that is gone swallows them."""

    def send(self, peer: Incarnation, message: Message) -> None: ...


def difference(ours: Identity, theirs: PeerHello, *, protocol_version: int) -> tuple[str, str, str] | None:
    """`(field, ours, theirs)` of the first thing in which the two sides can't work together, or None."""
    pairs = [
        ("protocol_version", protocol_version, theirs.protocol_version),
        ("model_fingerprint", ours.model_fingerprint, theirs.model_fingerprint),
        *(
            (f"layout.{field}", getattr(ours.layout, field), getattr(theirs.layout, field))
            for field in KvLayout.__struct_fields__
        ),
        ("tail_slot_bytes", ours.tail_slot_bytes, theirs.tail_slot_bytes),
    ]
    for field, our_value, their_value in pairs:
        if our_value != their_value:
            return field, str(our_value), str(their_value)
    return None
