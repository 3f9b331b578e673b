"""The fabric port inside one process, without threads: writes are applied when somebody pumps.

A network draws from its seed how long each write takes to land and to complete, and which fail. A write's bytes are
read as late as libfabric may read them: when it lands or completes, whichever is first (so rule H3 is put to the test).
Local completion and landing are independent, as on tcp. A fenced write that was posted before the fence still lands,
and `Fenced` comes after it. A NIC is a number: each pair of NICs keeps the order of its own writes, and a key of its
own.
"""

from dataclasses import dataclass
from itertools import accumulate, pairwise

from pdserve.clock import Clock
from pdserve.errors import FabricError
from pdserve.fabric.memory_inbox import Exposure, Inbox
from pdserve.fabric.memory_sender import MemorySender, Peer, Push
from pdserve.fabric.memory_timeline import MemoryFaults, Timeline
from pdserve.fabric.placement import due_tick, require_gapless, require_inside, require_nics
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
from pdserve.shared_region import MemoryRegion, SharedRegion

__all__ = ["MemoryFabric", "MemoryFaults", "MemoryNetwork"]


class MemoryNetwork:
    """Joins fabrics. Deterministic: the same calls on the same clock do the same."""

    def __init__(self, seed: int, clock: Clock, faults: MemoryFaults | None = None) -> None:
        self.timeline = Timeline(seed, clock, faults or MemoryFaults())
        self.fabrics: list[MemoryFabric] = []
        self.exposures: dict[int, Exposure] = {}
        """Those that are open, by each of their keys."""

    def open(self, *, num_nics_by_group: tuple[int, ...] = (1,)) -> "MemoryFabric":
        fabric = MemoryFabric(self, index=len(self.fabrics), num_nics_by_group=num_nics_by_group)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Registration:
    region: SharedRegion
    nics: range


class MemoryFabric:
    """A `Fabric` of a `MemoryNetwork`. `poll` pumps the whole network."""

    provider = "memory"

    def __init__(self, network: MemoryNetwork, *, index: int, num_nics_by_group: tuple[int, ...]) -> None:
        self.num_nics = sum(num_nics_by_group)
        self.address = b" ".join(b"memory:%d/%d" % (index, nic) for nic in range(self.num_nics))
        self.inbox = Inbox()
        self.sender = MemorySender(network.timeline, self.inbox, network.exposures, num_nics=self.num_nics)
        self._network = network
        starts = accumulate(num_nics_by_group, initial=0)
        self._groups = [range(start, stop) for start, stop in pairwise(starts)]
        """The NICs of each."""
        self._regions: dict[RegionId, _Registration] = {}
        self._peers: dict[FabricPeerId, Peer] = {}
        self._targets: dict[RemoteRegionId, tuple[FabricPeerId, RegionDescriptor]] = {}
        self._next_id = 1

    def watch(self, counter: SharedRegion) -> None:
        if self.sender.counter is not None:
            raise FabricError("watch: this fabric watches a layer counter already", operation="watch")
        self.sender.counter = counter

    def register(self, region: MemoryRegion, *, group_index: int = 0) -> RegionId:
        if not isinstance(region, SharedRegion):
            raise FabricError(f"register: {region.kind.value} memory is out of reach", operation="register")
        if group_index not in range(len(self._groups)):
            raise FabricError(f"register: no domain group {group_index}", operation="register")
        region_id = RegionId(self._take_id())
        self._regions[region_id] = _Registration(region=region, nics=self._groups[group_index])
        return region_id

    def expose(self, region_id: RegionId) -> RegionDescriptor:
        registered = self._find_region("expose", region_id)
        num_bytes = registered.region.num_bytes
        keys = tuple(self._network.timeline.draw_key() for _ in registered.nics)
        part = RegionSlice(start=0, num_bytes=num_bytes, base=0, keys=keys)
        descriptor = RegionDescriptor(num_bytes=num_bytes, nics=tuple(registered.nics), slices=(part,))
        exposure = Exposure(owner=self.inbox, region=registered.region, descriptor=descriptor)
        self._network.exposures.update(dict.fromkeys(keys, exposure))
        return descriptor

    def fence(self, exposure: RegionDescriptor) -> None:
        keys = [key for part in exposure.slices for key in part.keys]
        exposed = self._network.exposures.get(keys[0]) if keys else None
        if exposed is None or exposed.owner is not self.inbox:
            raise FabricError("fence: the descriptor is not of an exposure that is open", operation="fence")
        for key in exposed.descriptor.slices[0].keys:
            del self._network.exposures[key]
        exposed.close()

    def connect(self, address: bytes) -> FabricPeerId:
        for fabric in self._network.fabrics:
            if fabric.address == address:
                peer_id = FabricPeerId(self._take_id())
                self._peers[peer_id] = Peer(inbox=fabric.inbox, num_nics=fabric.num_nics)
                return peer_id
        raise FabricError(f"connect: {address!r} is no address of this network", operation="connect")

    def disconnect(self, peer_id: FabricPeerId) -> None:
        self.sender.remove(self._find_peer("disconnect", peer_id))
        del self._peers[peer_id]
        self._targets = {target: owned for target, owned in self._targets.items() if owned[0] != peer_id}

    def attach(self, peer_id: FabricPeerId, descriptor: RegionDescriptor) -> RemoteRegionId:
        peer = self._find_peer("attach", peer_id)
        require_gapless(descriptor)
        require_nics(descriptor, num_peer_nics=peer.num_nics)
        target = RemoteRegionId(self._take_id())
        self._targets[target] = (peer_id, descriptor)
        return target

    def arm(self, push: PagePush | SingleWrite) -> None:
        peer = self._find_peer("arm", push.peer_id)
        descriptor = self._find_target("arm", push.peer_id, push.target)
        source = self._find_region("arm", push.source)
        require_inside(push, source_bytes=source.region.num_bytes, target_bytes=descriptor.num_bytes)
        if self.sender.counter is None and due_tick(push, 0) > 0:
            raise FabricError("arm: a push that waits for a tick needs a watched layer counter", operation="arm")
        self.sender.arm(Push(request=push, peer=peer, source=source.region, target=descriptor, local_nics=source.nics))
        self._network.pump()

    def cancel(self, push_id: PushId) -> None:
        self.sender.cancel(push_id)

    def flush(
        self, flush_id: FlushId, peer_id: FabricPeerId, targets: tuple[RemoteRegionId, ...], *, deadline_ns: int
    ) -> None:
        peer = self._find_peer("flush", peer_id)
        if not targets:
            raise FabricError("flush: no region to write the flush word to", operation="flush")
        descriptors = [self._find_target("flush", peer_id, target) for target in targets]
        self.sender.flush(flush_id, peer, descriptors, deadline_ns=deadline_ns)
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
            bytes_posted=sum(sender.bytes_posted_by_nic),
            bytes_posted_by_nic=tuple(sender.bytes_posted_by_nic),
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

    def _find_region(self, operation: str, region_id: RegionId) -> _Registration:
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
