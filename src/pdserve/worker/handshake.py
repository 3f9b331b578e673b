"""How a decode worker and a prefill worker meet: who says what first, and what makes them refuse each other.

The prefill side speaks first and offers nothing but its description. The decode side compares, and only then makes
memory keys for this peer and sends them. The prefill side compares too, and answers with a heartbeat or a refusal.
"""

from pdserve.cluster.registry import MAX_LEASE_S, MIN_LEASE_S
from pdserve.config.worker import WorkerSettings
from pdserve.errors import HandoffError, LayoutMismatch, RemoteProtocolError
from pdserve.fabric.port import Fabric
from pdserve.transfer.identity import Identity, difference
from pdserve.wire.channel import Channel
from pdserve.wire.peer import (
    PROTOCOL_VERSION,
    DecodeToPrefill,
    Heartbeat,
    PeerHello,
    PeerRefused,
    PrefillToDecode,
    RankRegions,
)
from pdserve.worker.connections import receive_within


def hello(
    identity: Identity, settings: WorkerSettings, fabric: Fabric, *, regions: tuple[RankRegions, ...] = ()
) -> PeerHello:
    """What we say of ourselves; with `regions`, the keys to ours."""
    return PeerHello(
        protocol_version=PROTOCOL_VERSION,
        worker_id=identity.worker_id,
        incarnation=identity.incarnation,
        model_fingerprint=identity.model_fingerprint,
        sharding=identity.sharding,
        draft_layout=identity.draft_layout,
        num_pages=identity.num_pages,
        tail_slot_bytes=identity.tail_slot_bytes,
        heartbeat_s=settings.heartbeat_s,
        lease_s=settings.lease_s,
        fabric_provider=fabric.provider,
        fabric_address=fabric.address,
        regions=regions,
    )


def mismatch(identity: Identity, fabric: Fabric, theirs: PeerHello) -> PeerRefused | None:
    """The refusal that `theirs` deserves, or None."""
    found = difference(identity, theirs, protocol_version=PROTOCOL_VERSION)
    if found is None and fabric.provider != theirs.fabric_provider:
        found = ("fabric_provider", fabric.provider, theirs.fabric_provider)
    if found is None and not MIN_LEASE_S <= theirs.lease_s <= MAX_LEASE_S:
        found = ("lease_s", f"between {MIN_LEASE_S:g} and {MAX_LEASE_S:g}", f"{theirs.lease_s:g}")
    if found is None:
        return None
    field, ours, their_value = found
    return PeerRefused(field=field, ours=ours, theirs=their_value)


async def hear(
    channel: Channel[DecodeToPrefill] | Channel[PrefillToDecode],
    identity: Identity,
    fabric: Fabric,
    *,
    timeout_s: float,
) -> PeerHello:
    """The peer's hello, compared with what we are.

    Raises: `LayoutMismatch` when the two can't work together (the peer is told), `PeerLost` when it is silent.
    """
    theirs = await receive_within(channel, timeout_s=timeout_s)
    if not isinstance(theirs, PeerHello):
        raise _refusal(theirs, channel.peer)
    channel.peer = theirs.worker_id
    refusal = mismatch(identity, fabric, theirs)
    if refusal is not None:
        channel.send(refusal)
        raise LayoutMismatch(field=refusal.field, ours=refusal.ours, theirs=refusal.theirs, peer=theirs.worker_id)
    return theirs


async def await_acceptance(channel: Channel[PrefillToDecode], *, timeout_s: float) -> None:
    """Raises: `LayoutMismatch` when the prefill side refuses; `PeerLost` when it is silent."""
    answer = await receive_within(channel, timeout_s=timeout_s)
    if not isinstance(answer, Heartbeat):
        raise _refusal(answer, channel.peer)


def _refusal(message: DecodeToPrefill | PrefillToDecode, peer: str) -> HandoffError | RemoteProtocolError:
    if isinstance(message, PeerRefused):
        return LayoutMismatch(field=message.field, ours=message.theirs, theirs=message.ours, peer=peer)
    return RemoteProtocolError(f"{type(message).__name__} came where a hello belongs", peer=peer)
