"""The fabric port inside one process, without threads: writes are applied when somebody pumps.

A network draws from its seed how long each write takes to land and to complete, and which fail. A write's bytes are
read as late as libfabric may read them: when it lands or completes, whichever is first (so rule H3 is put to the test).
Local completion and landing are independent, as on tcp. A fenced write that was posted before the fence still lands,
and `Fenced` comes after it.
"""

from pdserve.clock import Clock
from pdserve.errors import FabricError
from pdserve.fabric.memory_inbox import Exposure, Inbox
from pdserve.fabric.memory_sender import MemorySender, Peer, Push
from pdserve.fabric.memory_timeline import MemoryFaults, Timeline
from pdserve.fabric.placement import due_tick, require_gapless, require_inside
from pdserve.fabric.port import (
    FabricEvent,
    FabricPeerId,
    FabricStats,
    FlushId,
    PagePush,
    PushId,
    RegionDescriptor,
    RegionId,
    RegionSlice,
    RemoteRegionId,
    SingleWrite,
)
from pdserve.ids import Immediate
from pdserve.shared_region import SharedRegion

__all__ = ["MemoryFabric", "MemoryFaults", "MemoryNetwork"]


class MemoryNetwork:
    """Joins fabrics. Deterministic: the same calls on the same clock do the same."""

    def __init__(self, seed: int, clock: Clock, faults: MemoryFaults | None = None) -> None:
        self.timeline = Timeline(seed, clock, faults or MemoryFaults())
        self.fabrics: list[MemoryFabric] = []
        self.exposures: dict[int, Exposure] = {}
        """Those that are open, by key."""

    def open(self) -> "MemoryFabric":
        fabric = MemoryFabric(self, address=b"memory:%d" % len(self.fabrics))
        self.fabrics.append(fabric)
        return fabric

    def kill(self, fabric: "MemoryFabric") -> None:
        """End the fabric as a SIGKILL would: it gets no events, nothing lands in it, writes to it fail."""
        fabric.inbox.is_alive = False

    def next_ns(self) -> int | None:
        """When something happens next by time alone (a tick of a layer counter may come before); None: never."""
        return self.timeline.next_ns()

    def pump(self) -> None:
        """Do everything that is due, in the order and at the instants at which it was due."""
        now_ns = self.timeline.clock.now_ns()
        at_ns: int | None = now_ns
        while at_ns is not None:
            for fabric in self.fabrics:
                fabric.sender.post_due(at_ns)
            at_ns = self.timeline.do_next(until_ns=now_ns)


class MemoryFabric:
    """A `Fabric` of a `MemoryNetwork`. `poll` pumps the whole network."""

    provider = "memory"

    def __init__(self, network: MemoryNetwork, *, address: bytes) -> None:
        self.address = address
        self.inbox = Inbox()
        self.sender = MemorySender(network.timeline, self.inbox, network.exposures)
        self._network = network
        self._regions: dict[RegionId, SharedRegion] = {}
        self._peers: dict[FabricPeerId, Peer] = {}
        self._targets: dict[RemoteRegionId, tuple[FabricPeerId, RegionDescriptor]] = {}
        self._next_id = 1

    def watch(self, counter: SharedRegion) -> None:
        if self.sender.counter is not None:
            raise FabricError("watch: this fabric watches a layer counter already", operation="watch")
        self.sender.counter = counter

    def register(self, region: SharedRegion) -> RegionId:
        region_id = RegionId(self._take_id())
        self._regions[region_id] = region
        return region_id

    def expose(self, region_id: RegionId) -> RegionDescriptor:
        region = self._find_region("expose", region_id)
        key = self._network.timeline.draw_key()
        part = RegionSlice(start=0, num_bytes=region.num_bytes, base=0, key=key)
        descriptor = RegionDescriptor(num_bytes=region.num_bytes, slices=(part,))
        self._network.exposures[key] = Exposure(owner=self.inbox, region=region, descriptor=descriptor)
        return descriptor

    def fence(self, exposure: RegionDescriptor) -> None:
        exposed = self._network.exposures.get(exposure.slices[0].key) if exposure.slices else None
        if exposed is None or exposed.owner is not self.inbox:
            raise FabricError("fence: the descriptor is not of an exposure that is open", operation="fence")
        del self._network.exposures[exposure.slices[0].key]
        exposed.close()

    def connect(self, address: bytes) -> FabricPeerId:
        for fabric in self._network.fabrics:
            if fabric.address == address:
                peer_id = FabricPeerId(self._take_id())
                self._peers[peer_id] = Peer(inbox=fabric.inbox)
                return peer_id
        raise FabricError(f"connect: {address!r} is no address of this network", operation="connect")

    def disconnect(self, peer_id: FabricPeerId) -> None:
        self.sender.remove(self._find_peer("disconnect", peer_id))
        del self._peers[peer_id]
        self._targets = {target: owned for target, owned in self._targets.items() if owned[0] != peer_id}

    def attach(self, peer_id: FabricPeerId, descriptor: RegionDescriptor) -> RemoteRegionId:
        self._find_peer("attach", peer_id)
        require_gapless(descriptor)
        target = RemoteRegionId(self._take_id())
        self._targets[target] = (peer_id, descriptor)
        return target

    def arm(self, push: PagePush | SingleWrite) -> None:
        peer = self._find_peer("arm", push.peer_id)
        descriptor = self._find_target("arm", push.peer_id, push.target)
        source = self._find_region("arm", push.source)
        require_inside(push, source_bytes=source.num_bytes, target_bytes=descriptor.num_bytes)
        if self.sender.counter is None and due_tick(push, 0) > 0:
            raise FabricError("arm: a push that waits for a tick needs a watched layer counter", operation="arm")
        self.sender.arm(Push(request=push, peer=peer, key=descriptor.slices[0].key, source=source))
        self._network.pump()

    def cancel(self, push_id: PushId) -> None:
        self.sender.cancel(push_id)

    def flush(self, flush_id: FlushId, peer_id: FabricPeerId, target: RemoteRegionId, *, deadline_ns: int) -> None:
        peer = self._find_peer("flush", peer_id)
        key = self._find_target("flush", peer_id, target).slices[0].key
        self.sender.flush(flush_id, peer, key, deadline_ns=deadline_ns)
        self._network.pump()

    def expect(self, immediate: Immediate, num_writes: int, *, deadline_ns: int, record_arrivals: bool = False) -> None:
        inbox = self.inbox
        index, landed = inbox.arrivals.expect(immediate, num_writes, record_arrivals=record_arrivals)
        inbox.emit(landed)
        self._network.timeline.schedule(deadline_ns, lambda _: inbox.emit(inbox.arrivals.expire(immediate, index)))

    def forget(self, immediate: Immediate) -> None:
        self.inbox.arrivals.forget(immediate)

    def poll(self) -> list[FabricEvent]:
        self._network.pump()
        return self.inbox.take_events()

    def fileno(self) -> int:
        return self.inbox.event_fd

    def stats(self) -> FabricStats:
        sender = self.sender
        return FabricStats(
            bytes_posted=sender.bytes_posted,
            num_writes_posted=sender.num_posted,
            num_writes_completed=sender.num_completed,
            num_writes_failed=sender.num_failed,
            num_in_flight=sender.num_posted - sender.num_completed - sender.num_failed,
            num_immediates_received=self.inbox.arrivals.num_received,
            num_stale_immediates=self.inbox.arrivals.num_stale,
            num_armed_pushes=sender.num_armed_pushes,
        )

    def close(self) -> None:
        self.inbox.close()

    def _take_id(self) -> int:
        self._next_id += 1
        return self._next_id - 1

    def _find_region(self, operation: str, region_id: RegionId) -> SharedRegion:
        if region_id not in self._regions:
            raise FabricError(f"{operation}: no region {region_id}", operation=operation)
        return self._regions[region_id]

    def _find_peer(self, operation: str, peer_id: FabricPeerId) -> Peer:
        if peer_id not in self._peers:
            raise FabricError(f"{operation}: no peer {peer_id}", operation=operation)
        return self._peers[peer_id]

    def _find_target(self, operation: str, peer_id: FabricPeerId, target: RemoteRegionId) -> RegionDescriptor:
        owner, descriptor = self._targets.get(target, (None, None))
        if descriptor is None or owner != peer_id:
            raise FabricError(f"{operation}: no region {target} of peer {peer_id}", operation=operation)
        return descriptor
