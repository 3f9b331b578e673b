"""The messages between a decode worker and a prefill worker, on one connection per pair. See `docs/wire.md`.

The decode worker dials. Each side's first message is `PeerHello` or `PeerRefused`. After that the incarnations of
sender and receiver are in each message, and a message that names another pair is refused and counted (rule H4).
"""

import msgspec

from pdserve.fabric.port import RegionDescriptor
from pdserve.ids import HandoffId, Immediate, Incarnation, RequestId, TailSlot, WorkerId
from pdserve.kv.layout import KvLayout
from pdserve.kv.shard import KvSharding

PROTOCOL_VERSION = 4


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """The base of everything that is sent between workers; the tag is the class name."""


class Addressed(Message, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """A message after the handshake."""

    sender: Incarnation
    receiver: Incarnation


class RankRegions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where to write for one data parallel rank, under keys made for one peer alone."""

    kv: tuple[RegionDescriptor, ...]
    """By tensor parallel rank."""
    tail: RegionDescriptor
    draft_kv: RegionDescriptor | None = None
    """The drafter's cache, whole, of the same pages; as `draft_layout` of the hello says."""


class PeerHello(Message, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    protocol_version: int
    worker_id: WorkerId
    incarnation: Incarnation
    model_fingerprint: str
    sharding: KvSharding
    draft_layout: KvLayout | None = None
    """Of the cache of the drafter, where the sender speculates with one that has a cache. It is never sharded."""
    num_pages: int
    """Of each data parallel rank."""
    tail_slot_bytes: int
    heartbeat_s: float
    """The sender sends at least one message in this time; silence for `lease_s` is death."""
    lease_s: float
    fabric_provider: str
    fabric_address: bytes
    regions: tuple[RankRegions, ...] = ()
    """The decode side's, by data parallel rank; the prefill side gives none."""


class PeerRefused(Message, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """The handshake failed; the connection closes after it."""

    field: str
    ours: str
    theirs: str


class Grant(Addressed, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """Decode to prefill: compute tokens `[num_held_tokens, len(token_ids) - 1)` and write their KV into these pages."""

    handoff_id: HandoffId
    request_id: RequestId
    dp_rank: int
    """The data parallel rank whose pages and tail slot these are."""
    token_ids: tuple[int, ...]
    num_held_tokens: int
    """Leading tokens whose KV the decode side has; a multiple of `page_slots`."""
    page_indices: tuple[int, ...]
    """Destination pages of tokens `[num_held_tokens, len(token_ids) - 1)`, in order."""
    immediate: Immediate
    tail_slot: TailSlot
    timeout_s: float
    """The decode side gives up after this time, counted from the sending."""
    traced: bool = False


class GrantRefused(Addressed, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """Prefill to decode: nothing was and nothing will be written."""

    handoff_id: HandoffId
    message: str
    retry_after_s: float


class Cancel(Addressed, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """Decode to prefill: stop, drain, confirm."""

    handoff_id: HandoffId


class HandoffStopped(Addressed, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """Prefill to decode: no write of this handoff is in flight or will be (proved by a flush); the answer to `Cancel`,
    or unasked when the prefill side failed."""

    handoff_id: HandoffId
    message: str


class Heartbeat(Addressed, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """Either way: alive."""


DecodeToPrefill = PeerHello | PeerRefused | Grant | Cancel | Heartbeat
PrefillToDecode = PeerHello | PeerRefused | GrantRefused | HandoffStopped | Heartbeat
