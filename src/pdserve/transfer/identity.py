"""Who we are and what our KV cache looks like: what a handshake compares."""

from dataclasses import dataclass
from typing import Protocol

from pdserve.errors import LayoutMismatch
from pdserve.ids import Incarnation, WorkerId
from pdserve.kv.layout import KvLayout
from pdserve.kv.shard import KvSharding
from pdserve.wire.peer import Message, PeerHello


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """One worker's side of a handshake."""

    worker_id: WorkerId
    incarnation: Incarnation
    model_fingerprint: str
    sharding: KvSharding
    draft_layout: KvLayout | None = None
    """Of the drafter's cache, where there is one."""
    num_pages: int
    tail_slot_bytes: int


SAME_DRAFTER = "start both workers with the same model and the same --speculate"


class Outbox(Protocol):
    """Where a side puts its control messages. Never blocks; a peer that is gone swallows them."""

    def send(self, peer: Incarnation, message: Message) -> None: ...


def difference(ours: Identity, theirs: PeerHello, *, protocol_version: int) -> tuple[str, str, str] | None:
    """`(field, ours, theirs)` of the first thing in which the two sides can't work together, or None.

    The number of ranks may differ, as long as it divides the heads.
    """
    if protocol_version != theirs.protocol_version:
        return "protocol_version", str(protocol_version), str(theirs.protocol_version)
    if ours.draft_layout != theirs.draft_layout:  # the fingerprints differ too then, and say less
        return "draft_layout", _drafter(ours.draft_layout), f"{_drafter(theirs.draft_layout)}; {SAME_DRAFTER}"
    if ours.model_fingerprint != theirs.model_fingerprint:
        return "model_fingerprint", ours.model_fingerprint, theirs.model_fingerprint
    try:
        ours.sharding.layout.require_equal(theirs.sharding.layout, peer=theirs.worker_id)
    except LayoutMismatch as mismatch:
        return f"layout.{mismatch.field}", str(mismatch.ours), str(mismatch.theirs)
    if theirs.sharding.problem is not None:
        return "tensor_parallel_size", str(ours.sharding.num_ranks), theirs.sharding.problem
    if ours.tail_slot_bytes != theirs.tail_slot_bytes:
        return "tail_slot_bytes", str(ours.tail_slot_bytes), str(theirs.tail_slot_bytes)
    return None


def _drafter(layout: KvLayout | None) -> str:
    return "no drafter" if layout is None else str(layout)
