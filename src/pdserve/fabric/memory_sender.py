"""The sending half of an in-process fabric: pushes, writes under way, flushes. The rules are those of
`native/fabric/sender.h`.
"""

import errno
import heapq
from collections import deque
from dataclasses import dataclass, field

from pdserve.errors import CapacityError, FabricError
from pdserve.fabric.memory_inbox import Exposure, Inbox
from pdserve.fabric.memory_timeline import Timeline
from pdserve.fabric.placement import (
    due_tick,
    first_pair,
    nic_pairs,
    num_layers_of,
    num_writes_per_layer,
    write_offsets,
)
from pdserve.fabric.port import (
    FlushEnded,
    FlushId,
    LayerTimes,
    PagePush,
    PushEnded,
    PushId,
    PushOutcome,
    RegionDescriptor,
    SingleWrite,
)
from pdserve.layer_counter import RING_OFFSET, RING_TICKS
from pdserve.shared_region import SharedRegion

WINDOW_WRITES = 64
"""As in `native/fabric/sender.h`: at most so many writes are in flight on a route."""

MAX_PUSHES = 4096
"""As in `native/fabric/engine.h`."""

FLUSH_WORD_BYTES = 8


@dataclass(slots=True, eq=False)
class Route:
    """From one of our NICs to one of a peer's."""

    local_nic: int
    remote_nic: int
    num_in_flight: int = 0
    last_landing_ns: int = 0


@dataclass(slots=True, eq=False)
class Peer:
    inbox: Inbox
    num_nics: int
    routes: dict[tuple[int, int], Route] = field(default_factory=dict[tuple[int, int], Route])
    """Those that were armed for, by NIC of ours and NIC of theirs."""
    settled_ns: int = 0
    """When the last write posted so far has landed and completed."""
    error: int = 0
    """Not 0: nothing more is posted to it."""

    def open_routes(self, local_nics: range, remote_nics: tuple[int, ...]) -> list[Route]:
        """By pair."""
        routes: list[Route] = []
        for local, remote in nic_pairs(num_local=len(local_nics), num_remote=len(remote_nics)):
            ends = local_nics[local], remote_nics[remote]
            routes.append(self.routes.setdefault(ends, Route(*ends)))
        return routes


@dataclass(slots=True, eq=False)
class Push:
    request: PagePush | SingleWrite
    peer: Peer
    source: SharedRegion
    target: RegionDescriptor
    local_nics: range
    layer_index: int = 0
    write_index: int = 0
    num_in_flight: int = 0
    outcome: PushOutcome = PushOutcome.DONE
    error: int = 0
    times_ns: list[list[int]] = field(default_factory=list[list[int]])
    """[computed, posted, completed] of each layer."""
    num_unfinished: list[int] = field(default_factory=list[int])
    routes: list[Route] = field(default_factory=list[Route])
    """By pair."""

    def __post_init__(self) -> None:
        num_layers = num_layers_of(self.request)
        self.times_ns = [[0, 0, 0] for _ in range(num_layers)]
        self.num_unfinished = [num_writes_per_layer(self.request)] * num_layers
        self.routes = self.peer.open_routes(self.local_nics, self.target.nics)

    @property
    def tick(self) -> int:
        """What the layer counter must have reached for the next write."""
        return due_tick(self.request, self.layer_index)

    @property
    def route(self) -> Route:
        """What the next write goes over."""
        return self.routes[(first_pair(self.request) + self.write_index) % len(self.routes)]

    def wants_to_post(self) -> bool:
        all_posted = self.layer_index == len(self.times_ns) or num_writes_per_layer(self.request) == 0
        return self.outcome is PushOutcome.DONE and not all_posted

    def stop(self, outcome: PushOutcome, error: int = 0) -> None:
        if self.outcome is PushOutcome.DONE:
            self.outcome, self.error = outcome, error

    def end(self) -> PushEnded:
        layers = tuple(
            LayerTimes(computed_ns=computed, posted_ns=posted, completed_ns=completed)
            for computed, posted, completed in self.times_ns
        )
        return PushEnded(push_id=self.request.push_id, outcome=self.outcome, errno=self.error, layers=layers)


@dataclass(slots=True, eq=False)
class Write:
    """One write under way, from its posting until it has both landed and completed."""

    push: Push
    route: Route
    layer_index: int
    exposure: Exposure | None
    """None when there was none under the key any more."""
    source_offset: int
    target_offset: int
    num_bytes: int
    error: int = 0
    payload: bytes | None = None
    """What it carries, once the source may be reused."""
    has_landed: bool = False

    def read_source(self) -> bytes:
        return self.push.source.buffer[self.source_offset : self.source_offset + self.num_bytes]


class MemorySender:
    """Owns what one fabric has armed and posted; `inbox` is that fabric's own."""

    def __init__(self, timeline: Timeline, inbox: Inbox, exposures: dict[int, Exposure], *, num_nics: int) -> None:
        self.num_posted = self.num_completed = self.num_failed = 0
        self.bytes_posted_by_nic = [0] * num_nics
        self.counter: SharedRegion | None = None
        self._timeline = timeline
        self._inbox = inbox
        self._exposures = exposures
        self._pushes: dict[PushId, Push] = {}
        self._num_armed = 0
        self._waiting: list[tuple[int, int, Push]] = []
        """A heap by tick, then by order of arming."""
        self._ready: deque[Push] = deque()
        self._flushes: set[FlushId] = set()

    @property
    def num_armed_pushes(self) -> int:
        return len(self._pushes)

    def arm(self, push: Push) -> None:
        push_id = push.request.push_id
        if push_id in self._pushes:
            raise FabricError(f"arm: push {push_id} has not ended yet", operation="arm")
        if len(self._pushes) >= MAX_PUSHES:
            raise CapacityError(f"arm: {MAX_PUSHES} pushes are armed already", retry_after_s=0.05)
        if push.peer.error:
            push.stop(PushOutcome.FAILED, push.peer.error)
        self._pushes[push_id] = push
        self._wait_for_tick(push)
        self._end_if_ended(push)

    def cancel(self, push_id: PushId) -> None:
        push = self._pushes.get(push_id)
        if push is not None:
            push.stop(PushOutcome.CANCELLED)
            self._end_if_ended(push)

    def remove(self, peer: Peer) -> None:
        """End what is armed to the peer; what is posted still completes."""
        self._stop_pushes_to(peer, PushOutcome.CANCELLED, 0)
        peer.error = peer.error or errno.EHOSTDOWN

    def flush(self, flush_id: FlushId, peer: Peer, targets: list[RegionDescriptor], *, deadline_ns: int) -> None:
        if flush_id in self._flushes:
            raise FabricError(f"flush: flush {flush_id} has not ended yet", operation="flush")
        self._flushes.add(flush_id)
        timeline = self._timeline
        delivered_ns = max(timeline.clock.now_ns(), peer.settled_ns) + timeline.draw_delay_ns()
        timeline.schedule(delivered_ns, lambda _: self._deliver_flush(flush_id, peer, targets))
        timeline.schedule(deadline_ns, lambda _: self._end_flush(flush_id, errno.ETIMEDOUT))

    def post_due(self, now_ns: int) -> None:
        """Hand the writes that are due, and fit into their peer's window, to the network."""
        if not self._inbox.is_alive:
            return
        ticks = self._read_counter(0)
        while self._waiting and self._waiting[0][0] <= ticks:
            self._ready.append(heapq.heappop(self._waiting)[2])
        for _ in range(len(self._ready)):
            push = self._ready.popleft()
            while push.wants_to_post() and push.tick <= ticks and push.route.num_in_flight < WINDOW_WRITES:
                self._post(push, now_ns)
            if push.wants_to_post() and push.tick <= ticks:
                self._ready.append(push)
            else:
                self._wait_for_tick(push)

    def _wait_for_tick(self, push: Push) -> None:
        if push.wants_to_post():
            self._num_armed += 1
            heapq.heappush(self._waiting, (push.tick, self._num_armed, push))

    def _post(self, push: Push, now_ns: int) -> None:
        layer_index, write_index, route = push.layer_index, push.write_index, push.route
        if write_index == 0:
            push.times_ns[layer_index][:2] = self._tick_ns(push.tick), now_ns
        source_offset, target_offset, num_bytes = write_offsets(
            push.request, layer_index=layer_index, write_index=write_index
        )
        write = Write(
            push=push,
            route=route,
            layer_index=layer_index,
            exposure=self._exposures.get(_key_of(push.target, route.remote_nic)),
            source_offset=source_offset,
            target_offset=target_offset,
            num_bytes=num_bytes,
        )
        push.write_index += 1
        if push.write_index == num_writes_per_layer(push.request):
            push.layer_index, push.write_index = layer_index + 1, 0
        push.num_in_flight += 1
        route.num_in_flight += 1
        self.num_posted += 1
        self.bytes_posted_by_nic[route.local_nic] += num_bytes
        self._send(write, now_ns)

    def _send(self, write: Write, now_ns: int) -> None:
        timeline, peer, route = self._timeline, write.push.peer, write.route
        landing_ns = now_ns + timeline.draw_delay_ns()
        completion_ns = now_ns + timeline.draw_delay_ns()
        if not timeline.faults.reorder:
            landing_ns = route.last_landing_ns = max(landing_ns, route.last_landing_ns)
        peer.settled_ns = max(peer.settled_ns, landing_ns, completion_ns)
        fails = timeline.draw_failure()
        exposure = write.exposure
        if exposure is None:
            write.error = errno.EACCES
        else:
            write.error = errno.ECONNRESET if fails else 0
            exposure.num_in_flight += 1
            timeline.schedule(landing_ns, lambda at_ns: self._land(write, exposure, at_ns))
        timeline.schedule(completion_ns, lambda at_ns: self._complete(write, at_ns))

    def _land(self, write: Write, exposure: Exposure, now_ns: int) -> None:
        payload = write.payload
        # The bytes of a process that died before it let go of them went with it.
        if payload is None and self._inbox.is_alive:
            payload = write.read_source()
        if write.error == 0 and exposure.owner.is_alive and payload is not None:
            exposure.region.buffer[write.target_offset : write.target_offset + write.num_bytes] = payload
            write.has_landed = True
            exposure.owner.arrive(write.push.request.immediate, write.route.remote_nic, now_ns)
        exposure.write_ended()

    def _complete(self, write: Write, now_ns: int) -> None:
        push, peer = write.push, write.push.peer
        if not self._inbox.is_alive:
            return
        if not write.has_landed:
            write.payload = write.read_source()
            if not peer.inbox.is_alive:
                write.error = write.error or errno.ECONNRESET
        push.num_in_flight -= 1
        write.route.num_in_flight -= 1
        if write.error:
            self.num_failed += 1
            self._fail(peer, write.error)
        else:
            self.num_completed += 1
            push.num_unfinished[write.layer_index] -= 1
            if push.num_unfinished[write.layer_index] == 0:
                push.times_ns[write.layer_index][2] = now_ns
        self._end_if_ended(push)

    def _fail(self, peer: Peer, error: int) -> None:
        peer.error = peer.error or error
        self._stop_pushes_to(peer, PushOutcome.FAILED, error)

    def _stop_pushes_to(self, peer: Peer, outcome: PushOutcome, error: int) -> None:
        for push in [push for push in self._pushes.values() if push.peer is peer]:
            push.stop(outcome, error)
            self._end_if_ended(push)

    def _deliver_flush(self, flush_id: FlushId, peer: Peer, targets: list[RegionDescriptor]) -> None:
        if flush_id not in self._flushes or not self._inbox.is_alive:
            return
        for route in peer.routes.values():
            target = next((target for target in targets if route.remote_nic in target.nics), None)
            if target is not None and not peer.error:
                self._write_flush_word(peer, _key_of(target, route.remote_nic))
        self._end_flush(flush_id, peer.error)

    def _write_flush_word(self, peer: Peer, key: int) -> None:
        exposure = self._exposures.get(key)
        if not peer.inbox.is_alive:
            self._fail(peer, errno.ECONNRESET)
        elif exposure is None:
            self._fail(peer, errno.EACCES)
        else:
            exposure.region.buffer[-FLUSH_WORD_BYTES:] = bytes(FLUSH_WORD_BYTES)

    def _end_flush(self, flush_id: FlushId, error: int) -> None:
        if flush_id in self._flushes:
            self._flushes.discard(flush_id)
            self._inbox.emit(FlushEnded(flush_id=flush_id, delivered=error == 0, errno=error))

    def _end_if_ended(self, push: Push) -> None:
        has_ended = push.num_in_flight == 0 and not push.wants_to_post()
        if has_ended and self._pushes.pop(push.request.push_id, None) is not None:
            self._inbox.emit(push.end())

    def _read_counter(self, offset: int) -> int:
        if self.counter is None:
            return 0
        return int.from_bytes(self.counter.buffer[offset : offset + 8], "little")

    def _tick_ns(self, tick: int) -> int:
        return self._read_counter(RING_OFFSET + tick % RING_TICKS * 8) if tick > 0 else 0


def _key_of(target: RegionDescriptor, nic: int) -> int:
    return target.slices[0].keys[target.nics.index(nic)]
