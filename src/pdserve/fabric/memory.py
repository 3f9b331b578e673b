"""The fabric port inside one process, without threads: writes are applied when somebody pumps.

A network draws from its seed how long each write takes to land and to complete, and which fail. A write's bytes are
read as late as libfabric may read them: when it lands or completes, whichever is first (so rule H3 is put to the test).
Local completion and landing are independent, as on tcp. A fenced write that was posted before the fence still lands, and
`Fenced` comes after it.
"""

import errno
import heapq
import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from pdserve.clock import Clock
from pdserve.errors import CapacityError, FabricError
from pdserve.fabric.arrivals import Arrivals
from pdserve.fabric.placement import (
    due_tick,
    num_layers_of,
    num_writes_per_layer,
    require_gapless,
    require_inside,
    write_offsets,
)
from pdserve.fabric.port import (
    FabricEvent,
    FabricPeerId,
    FabricStats,
    Fenced,
    FlushEnded,
    FlushId,
    LayerTimes,
    PagePush,
    PushEnded,
    PushId,
    PushOutcome,
    RegionDescriptor,
    RegionId,
    RegionSlice,
    RemoteRegionId,
    SingleWrite,
)
from pdserve.ids import Immediate
from pdserve.layer_counter import RING_OFFSET, RING_TICKS
from pdserve.shared_region import SharedRegion

WINDOW_WRITES = 64
"""As in `native/fabric/sender.h`: at most so many writes to a peer are in flight."""

MAX_PUSHES = 4096
"""As in `native/fabric/engine.h`."""

FLUSH_WORD_BYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFaults:
    """What the network does to writes; by default nothing: a write lands and completes when it is posted."""

    min_delay_ns: int = 0
    max_delay_ns: int = 0
    reorder: bool = False
    """Writes to one peer may overtake each other."""
    write_failure_probability: float = 0.0
    """Of each write to fail, and with it its peer."""


class MemoryNetwork:
    """Joins fabrics; owns what is under way. Deterministic: the same calls on the same clock do the same."""

    def __init__(self, seed: int, clock: Clock, faults: MemoryFaults | None = None) -> None:
        self.clock = clock
        self.faults = faults or MemoryFaults()
        self.fabrics: list[MemoryFabric] = []
        self.exposures: dict[int, Exposure] = {}
        self._random = random.Random(seed)
        self._agenda: list[tuple[int, int, Callable[[int], None]]] = []
        self._num_scheduled = 0

    def open(self) -> "MemoryFabric":
        fabric = MemoryFabric(self, address=b"memory:%d" % len(self.fabrics))
        self.fabrics.append(fabric)
        return fabric

    def kill(self, fabric: "MemoryFabric") -> None:
        """End the fabric as a SIGKILL would: it gets no events, nothing lands in it, writes to it fail."""
        fabric.is_alive = False

    def next_ns(self) -> int | None:
        """When something happens next by time alone (a tick of a layer counter may come before); None: never."""
        return self._agenda[0][0] if self._agenda else None

    def pump(self) -> None:
        """Do everything that is due, in the order and at the instants at which it was due."""
        now_ns = self.clock.now_ns()
        for fabric in self.fabrics:
            fabric.post_due(now_ns)
        while self._agenda and self._agenda[0][0] <= now_ns:
            at_ns, _, action = heapq.heappop(self._agenda)
            action(at_ns)
            for fabric in self.fabrics:
                fabric.post_due(at_ns)

    def schedule(self, at_ns: int, action: Callable[[int], None]) -> None:
        """Call `action` with `at_ns` once a pump finds that instant passed."""
        self._num_scheduled += 1
        heapq.heappush(self._agenda, (at_ns, self._num_scheduled, action))

    def draw_delay_ns(self) -> int:
        return self._random.randint(self.faults.min_delay_ns, self.faults.max_delay_ns)

    def draw_failure(self) -> bool:
        return self._random.random() < self.faults.write_failure_probability

    def draw_key(self) -> int:
        return self._random.getrandbits(64)


@dataclass(slots=True, eq=False)
class Exposure:
    """A region of a fabric under a key; closed once it is fenced."""

    owner: "MemoryFabric"
    region: SharedRegion
    descriptor: RegionDescriptor
    num_in_flight: int = 0
    is_closed: bool = False

    def write_ended(self) -> None:
        self.num_in_flight -= 1
        self.emit_if_settled()

    def emit_if_settled(self) -> None:
        if self.is_closed and self.num_in_flight == 0:
            self.owner.emit(Fenced(exposure=self.descriptor))


@dataclass(slots=True, eq=False)
class _Peer:
    fabric: "MemoryFabric"
    num_in_flight: int = 0
    settled_ns: int = 0
    """When the last write posted so far has landed and completed."""
    last_landing_ns: int = 0
    error: int = 0
    """Not 0: nothing more is posted to it."""


@dataclass(slots=True, eq=False)
class _Push:
    request: PagePush | SingleWrite
    peer: _Peer
    key: int
    source: SharedRegion
    layer_index: int = 0
    write_index: int = 0
    num_in_flight: int = 0
    outcome: PushOutcome = PushOutcome.DONE
    error: int = 0
    times_ns: list[list[int]] = field(default_factory=list[list[int]])
    """[computed, posted, completed] of each layer."""
    num_unfinished: list[int] = field(default_factory=list[int])

    def all_posted(self) -> bool:
        return self.layer_index == num_layers_of(self.request) or num_writes_per_layer(self.request) == 0

    def stop(self, outcome: PushOutcome, error: int = 0) -> None:
        if self.outcome is PushOutcome.DONE:
            self.outcome, self.error = outcome, error

    def ended(self) -> bool:
        return self.num_in_flight == 0 and (self.outcome is not PushOutcome.DONE or self.all_posted())


@dataclass(slots=True, eq=False)
class _Write:
    """One write under way, from its posting until it has both landed and completed."""

    push: _Push
    layer_index: int
    exposure: Exposure | None
    source_offset: int
    target_offset: int
    num_bytes: int
    error: int = 0
    payload: bytes | None = None
    has_landed: bool = False

    def read_source(self) -> bytes:
        return self.push.source.buffer[self.source_offset : self.source_offset + self.num_bytes]


class MemoryFabric:
    """A `Fabric` of a `MemoryNetwork`. `poll` pumps the whole network."""

    provider = "memory"

    def __init__(self, network: MemoryNetwork, *, address: bytes) -> None:
        self.address = address
        self.is_alive = True
        self._network = network
        self._event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._events: list[FabricEvent] = []
        self._arrivals = Arrivals()
        self._counter: SharedRegion | None = None
        self._regions: dict[RegionId, SharedRegion] = {}
        self._peers: dict[FabricPeerId, _Peer] = {}
        self._targets: dict[RemoteRegionId, tuple[FabricPeerId, RegionDescriptor]] = {}
        self._pushes: dict[PushId, _Push] = {}
        self._flushes: set[FlushId] = set()
        self._next_id = 1
        self._num_posted = self._num_completed = self._num_failed = self._bytes_posted = 0

    def watch(self, counter: SharedRegion) -> None:
        if self._counter is not None:
            raise FabricError("watch: this fabric watches a layer counter already", operation="watch")
        self._counter = counter

    def register(self, region: SharedRegion) -> RegionId:
        region_id = RegionId(self._take_id())
        self._regions[region_id] = region
        return region_id

    def expose(self, region_id: RegionId) -> RegionDescriptor:
        region = self._find_region("expose", region_id)
        key = self._network.draw_key()
        part = RegionSlice(start=0, num_bytes=region.num_bytes, base=0, key=key)
        descriptor = RegionDescriptor(num_bytes=region.num_bytes, slices=(part,))
        self._network.exposures[key] = Exposure(owner=self, region=region, descriptor=descriptor)
        return descriptor

    def fence(self, exposure: RegionDescriptor) -> None:
        exposed = self._network.exposures.pop(exposure.slices[0].key, None) if exposure.slices else None
        if exposed is None or exposed.owner is not self:
            raise FabricError("fence: the descriptor is not of an exposure that is open", operation="fence")
        exposed.is_closed = True
        exposed.emit_if_settled()

    def connect(self, address: bytes) -> FabricPeerId:
        for fabric in self._network.fabrics:
            if fabric.address == address:
                peer_id = FabricPeerId(self._take_id())
                self._peers[peer_id] = _Peer(fabric=fabric)
                return peer_id
        raise FabricError(f"connect: {address!r} is no address of this network", operation="connect")

    def disconnect(self, peer_id: FabricPeerId) -> None:
        peer = self._find_peer("disconnect", peer_id)
        del self._peers[peer_id]
        self._targets = {target: owned for target, owned in self._targets.items() if owned[0] != peer_id}
        for push in self._pushes_to(peer):
            push.stop(PushOutcome.CANCELLED)
        self._fail_peer(peer, errno.EHOSTDOWN)

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
        if self._counter is None and due_tick(push, 0) > 0:
            raise FabricError("arm: a push that waits for a tick needs a watched layer counter", operation="arm")
        if push.push_id in self._pushes:
            raise FabricError(f"arm: push {push.push_id} has not ended yet", operation="arm")
        if len(self._pushes) >= MAX_PUSHES:
            raise CapacityError(f"arm: {MAX_PUSHES} pushes are armed already", retry_after_s=0.05)
        num_layers = num_layers_of(push)
        armed = _Push(request=push, peer=peer, key=descriptor.slices[0].key, source=source)
        armed.times_ns = [[0, 0, 0] for _ in range(num_layers)]
        armed.num_unfinished = [num_writes_per_layer(push)] * num_layers
        if peer.error:
            armed.stop(PushOutcome.FAILED, peer.error)
        self._pushes[push.push_id] = armed
        self._end_if_ended(armed)
        self._network.pump()

    def cancel(self, push_id: PushId) -> None:
        push = self._pushes.get(push_id)
        if push is not None:
            push.stop(PushOutcome.CANCELLED)
            self._end_if_ended(push)

    def flush(self, flush_id: FlushId, peer_id: FabricPeerId, target: RemoteRegionId, *, deadline_ns: int) -> None:
        peer = self._find_peer("flush", peer_id)
        key = self._find_target("flush", peer_id, target).slices[0].key
        if flush_id in self._flushes:
            raise FabricError(f"flush: flush {flush_id} has not ended yet", operation="flush")
        self._flushes.add(flush_id)
        now_ns = self._network.clock.now_ns()
        delivered_ns = max(now_ns, peer.settled_ns) + self._network.draw_delay_ns()
        self._network.schedule(delivered_ns, lambda _: self._deliver_flush(flush_id, peer, key))
        self._network.schedule(deadline_ns, lambda _: self._end_flush(flush_id, errno.ETIMEDOUT))
        self._network.pump()

    def expect(self, immediate: Immediate, num_writes: int, *, deadline_ns: int, record_arrivals: bool = False) -> None:
        index, landed = self._arrivals.expect(immediate, num_writes, record_arrivals=record_arrivals)
        self.emit(landed)
        self._network.schedule(deadline_ns, lambda _: self.emit(self._arrivals.expire(immediate, index)))

    def forget(self, immediate: Immediate) -> None:
        self._arrivals.forget(immediate)

    def poll(self) -> list[FabricEvent]:
        self._network.pump()
        events, self._events = self._events, []
        if events:
            os.eventfd_read(self._event_fd)
        return events

    def fileno(self) -> int:
        return self._event_fd

    def stats(self) -> FabricStats:
        return FabricStats(
            bytes_posted=self._bytes_posted,
            num_writes_posted=self._num_posted,
            num_writes_completed=self._num_completed,
            num_writes_failed=self._num_failed,
            num_in_flight=self._num_posted - self._num_completed - self._num_failed,
            num_immediates_received=self._arrivals.num_received,
            num_stale_immediates=self._arrivals.num_stale,
            num_armed_pushes=len(self._pushes),
        )

    def close(self) -> None:
        if self._event_fd >= 0:
            self._network.kill(self)
            os.close(self._event_fd)
            self._event_fd = -1

    def emit(self, event: FabricEvent | None) -> None:
        """Queue an event for `poll`, while the fabric lives."""
        if event is None or not self.is_alive:
            return
        self._events.append(event)
        if len(self._events) == 1:
            os.eventfd_write(self._event_fd, 1)

    def post_due(self, now_ns: int) -> None:
        """Hand the writes that are due, and fit into their peer's window, to the network."""
        if not self.is_alive:
            return
        ticks = self._read_counter(0)
        for push in list(self._pushes.values()):
            while (
                push.outcome is PushOutcome.DONE
                and not push.all_posted()
                and due_tick(push.request, push.layer_index) <= ticks
                and push.peer.num_in_flight < WINDOW_WRITES
            ):
                self._post(push, now_ns)

    def _post(self, push: _Push, now_ns: int) -> None:
        layer_index, write_index = push.layer_index, push.write_index
        times_ns = push.times_ns[layer_index]
        if write_index == 0:
            times_ns[0], times_ns[1] = self._tick_ns(due_tick(push.request, layer_index)), now_ns
        source_offset, target_offset, num_bytes = write_offsets(
            push.request, layer_index=layer_index, write_index=write_index
        )
        write = _Write(
            push=push,
            layer_index=layer_index,
            exposure=self._network.exposures.get(push.key),
            source_offset=source_offset,
            target_offset=target_offset,
            num_bytes=num_bytes,
        )
        push.write_index += 1
        if push.write_index == num_writes_per_layer(push.request):
            push.layer_index, push.write_index = layer_index + 1, 0
        push.num_in_flight += 1
        push.peer.num_in_flight += 1
        self._num_posted += 1
        self._bytes_posted += num_bytes
        self._send(write, now_ns)

    def _send(self, write: _Write, now_ns: int) -> None:
        network, peer = self._network, write.push.peer
        landing_ns = now_ns + network.draw_delay_ns()
        completion_ns = now_ns + network.draw_delay_ns()
        if not network.faults.reorder:
            landing_ns = peer.last_landing_ns = max(landing_ns, peer.last_landing_ns)
        peer.settled_ns = max(peer.settled_ns, landing_ns, completion_ns)
        if write.exposure is None:
            write.error = errno.EACCES
        elif network.draw_failure():
            write.error = errno.ECONNRESET
        if write.exposure is not None:
            write.exposure.num_in_flight += 1
            network.schedule(landing_ns, lambda at_ns: self._land(write, at_ns))
        network.schedule(completion_ns, lambda at_ns: self._complete(write, at_ns))

    def _land(self, write: _Write, now_ns: int) -> None:
        exposure = write.exposure
        if exposure is None:
            return
        owner = exposure.owner
        # The bytes of a process that died before it let go of them went with it.
        payload = write.payload if write.payload is not None or not self.is_alive else write.read_source()
        if write.error == 0 and owner.is_alive and payload is not None:
            exposure.region.buffer[write.target_offset : write.target_offset + write.num_bytes] = payload
            write.has_landed = True
            owner.emit(owner._arrivals.arrive(write.push.request.immediate, now_ns))
        exposure.write_ended()

    def _complete(self, write: _Write, now_ns: int) -> None:
        push, peer = write.push, write.push.peer
        if not self.is_alive:
            return
        if not write.has_landed and not peer.fabric.is_alive:
            write.error = write.error or errno.ECONNRESET
        if write.payload is None and not write.has_landed:
            write.payload = write.read_source()
        push.num_in_flight -= 1
        peer.num_in_flight -= 1
        if write.error:
            self._num_failed += 1
            self._fail_peer(peer, write.error)
        else:
            self._num_completed += 1
            push.num_unfinished[write.layer_index] -= 1
            if push.num_unfinished[write.layer_index] == 0:
                push.times_ns[write.layer_index][2] = now_ns
        self._end_if_ended(push)

    def _fail_peer(self, peer: _Peer, error: int) -> None:
        peer.error = peer.error or error
        for push in self._pushes_to(peer):
            push.stop(PushOutcome.FAILED, error)
            self._end_if_ended(push)

    def _deliver_flush(self, flush_id: FlushId, peer: _Peer, key: int) -> None:
        exposure = self._network.exposures.get(key)
        error = peer.error
        if not peer.fabric.is_alive:
            error = error or errno.ECONNRESET
        elif exposure is None:
            error = error or errno.EACCES
        else:
            exposure.region.buffer[-FLUSH_WORD_BYTES:] = bytes(FLUSH_WORD_BYTES)
        if error:
            self._fail_peer(peer, error)
        self._end_flush(flush_id, error)

    def _end_flush(self, flush_id: FlushId, error: int) -> None:
        if flush_id in self._flushes:
            self._flushes.discard(flush_id)
            self.emit(FlushEnded(flush_id=flush_id, delivered=error == 0, errno=error))

    def _end_if_ended(self, push: _Push) -> None:
        if push.ended() and self._pushes.pop(push.request.push_id, None) is not None:
            layers = tuple(
                LayerTimes(computed_ns=computed, posted_ns=posted, completed_ns=completed)
                for computed, posted, completed in push.times_ns
            )
            self.emit(PushEnded(push_id=push.request.push_id, outcome=push.outcome, errno=push.error, layers=layers))

    def _pushes_to(self, peer: _Peer) -> list[_Push]:
        return [push for push in self._pushes.values() if push.peer is peer]

    def _read_counter(self, offset: int) -> int:
        if self._counter is None:
            return 0
        return int.from_bytes(self._counter.buffer[offset : offset + 8], "little")

    def _tick_ns(self, tick: int) -> int:
        return self._read_counter(RING_OFFSET + tick % RING_TICKS * 8) if tick > 0 else 0

    def _take_id(self) -> int:
        self._next_id += 1
        return self._next_id - 1

    def _find_region(self, operation: str, region_id: RegionId) -> SharedRegion:
        if region_id not in self._regions:
            raise FabricError(f"{operation}: no region {region_id}", operation=operation)
        return self._regions[region_id]

    def _find_peer(self, operation: str, peer_id: FabricPeerId) -> _Peer:
        if peer_id not in self._peers:
            raise FabricError(f"{operation}: no peer {peer_id}", operation=operation)
        return self._peers[peer_id]

    def _find_target(self, operation: str, peer_id: FabricPeerId, target: RemoteRegionId) -> RegionDescriptor:
        owner, descriptor = self._targets.get(target, (None, None))
        if descriptor is None or owner != peer_id:
            raise FabricError(f"{operation}: no region {target} of peer {peer_id}", operation=operation)
        return descriptor
