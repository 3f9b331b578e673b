"""The regions of a peer that we may write to, as the prefill side names them after a handshake."""

from dataclasses import dataclass

from pdserve.errors import FabricError, RemoteProtocolError
from pdserve.fabric.port import Fabric, FabricPeerId, RegionDescriptor, RemoteRegionId
from pdserve.kv.layout import KvLayout
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
    draft_kv: RemoteRegionId | None = None
    """Of rank 0, where the peer has a drafter with a cache."""
    tail: RemoteRegionId
    num_tail_slots: int

    @property
    def regions(self) -> tuple[RemoteRegionId, ...]:
        """All of them."""
        return (*self.kv, *(() if self.draft_kv is None else (self.draft_kv,)), self.tail)


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
                draft_kv=None if regions.draft_kv is None else fabric.attach(peer_id, regions.draft_kv),
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
    if (regions.draft_kv is None) != (hello.draft_layout is None):
        raise RemoteProtocolError("a drafter's layout and its KV region are offered together", peer=hello.worker_id)
    for region in regions.kv:
        _check_bytes(hello, region, hello.sharding.rank_layout)
    if regions.draft_kv is not None and hello.draft_layout is not None:
        _check_bytes(hello, regions.draft_kv, hello.draft_layout)


def _check_bytes(hello: PeerHello, region: RegionDescriptor, layout: KvLayout) -> None:
    if region.num_bytes < layout.region_bytes(hello.num_pages):
        raise RemoteProtocolError(
            f"{hello.num_pages} pages do not fit the offered {region.num_bytes} bytes", peer=hello.worker_id
        )
