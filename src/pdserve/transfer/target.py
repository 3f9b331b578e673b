"""The regions of a peer that we may write to, as the prefill side names them after a handshake."""

from dataclasses import dataclass

from pdserve.errors import FabricError, RemoteProtocolError
from pdserve.fabric.port import Fabric, FabricPeerId, RemoteRegionId
from pdserve.kv.shard import KvSharding
from pdserve.wire.peer import PeerHello, RankRegions


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One data parallel rank of a peer."""

    peer_id: FabricPeerId
    sharding: KvSharding
    num_pages: int
    kv: tuple[RemoteRegionId, ...]
    """By tensor parallel rank."""
    tail: RemoteRegionId
    num_tail_slots: int


def attach_targets(fabric: Fabric, hello: PeerHello, *, tail_slot_bytes: int) -> tuple[Target, ...]:
    """Connect to a peer and name its regions, by data parallel rank.

    Requires: a handshake without `difference`.
    Raises: `RemoteProtocolError` (no usable regions), `FabricError` (address or regions malformed).
    """
    if not hello.regions:
        raise RemoteProtocolError("a decode worker must offer its KV and tail regions", peer=hello.worker_id)
    for regions in hello.regions:
        _check(hello, regions)
    peer_id = fabric.connect(hello.fabric_address)
    try:
        return tuple(
            Target(
                peer_id=peer_id,
                sharding=hello.sharding,
                num_pages=hello.num_pages,
                kv=tuple(fabric.attach(peer_id, region) for region in regions.kv),
                tail=fabric.attach(peer_id, regions.tail),
                num_tail_slots=regions.tail.num_bytes // tail_slot_bytes,
            )
            for regions in hello.regions
        )
    except FabricError:
        fabric.disconnect(peer_id)
        raise


def _check(hello: PeerHello, regions: RankRegions) -> None:
    if len(regions.kv) != hello.sharding.num_ranks:
        raise RemoteProtocolError(
            f"{hello.sharding.num_ranks} ranks offer {len(regions.kv)} KV regions", peer=hello.worker_id
        )
    smallest_bytes = min(region.num_bytes for region in regions.kv)
    if smallest_bytes < hello.sharding.rank_layout.region_bytes(hello.num_pages):
        raise RemoteProtocolError(
            f"{hello.num_pages} pages do not fit the offered {smallest_bytes} bytes", peer=hello.worker_id
        )
