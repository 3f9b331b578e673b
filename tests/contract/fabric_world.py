"""Two joined fabrics, for the contract tests: in memory, or on libfabric in one process."""

import select
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from pdserve.clock import SystemClock
from pdserve.fabric.memory import MemoryNetwork
from pdserve.fabric.native import NativeFabric
from pdserve.fabric.port import (
    IMMEDIATE_GENERATION_BITS,
    DomainGroup,
    ExpectationExpired,
    Fabric,
    FabricEvent,
    FabricPeerId,
    Fenced,
    FlushEnded,
    FlushId,
    Landed,
    PagePush,
    PushEnded,
    PushId,
    RegionDescriptor,
    RegionId,
    RemoteRegionId,
    SingleWrite,
)
from pdserve.ids import Immediate
from pdserve.layer_counter import REGION_BYTES, RING_OFFSET
from pdserve.shared_region import SharedRegion
from pdserve.units import NS_PER_S

PAGE_BYTES = 8192
NUM_PAGES = 16
NUM_LAYERS = 3
LAYER_BYTES = PAGE_BYTES * NUM_PAGES
KV_BYTES = LAYER_BYTES * NUM_LAYERS
# The last operating system page belongs to the flush word.
REGION_SIZE_BYTES = KV_BYTES + 4096
HOLE = 0xEE
DEADLINE_S = 20.0
WINDOW_WRITES = 64

EventT = TypeVar("EventT", PushEnded, FlushEnded, Landed, ExpectationExpired, Fenced)


def immediate_of(slot: int, generation: int = 0) -> Immediate:
    return Immediate(slot << IMMEDIATE_GENERATION_BITS | generation)


@dataclass(eq=False)
class Rank:
    """The ticking side of a layer counter, as `pdserve.layer_counter` describes it."""

    region: SharedRegion
    ticks: int = 0

    def tick(self) -> int:
        """Returns the instant that was written."""
        from pdserve import _fabric

        _fabric.LayerCounter.at(self.region.address).tick()
        self.ticks += 1
        offset = RING_OFFSET + 8 * self.ticks
        return int.from_bytes(self.region.buffer[offset : offset + 8], "little")


class World:
    """Two fabrics of one kind, joined: a source region, a target region, an exposure, a layer counter.

    The initiator watches the counter and writes, the target counts.
    """

    def __init__(self, initiator: Fabric, target: Fabric) -> None:
        self.initiator, self.target = initiator, target
        self.source_region = SharedRegion.create(name="source", num_bytes=REGION_SIZE_BYTES)
        self.target_region = SharedRegion.create(name="target", num_bytes=REGION_SIZE_BYTES)
        self.rank = Rank(SharedRegion.create(name="counter", num_bytes=REGION_BYTES))
        generator = np.random.default_rng(seed=7)
        self.source_region.buffer[:] = generator.integers(0, 256, REGION_SIZE_BYTES, np.uint8).tobytes()
        self.target_region.buffer[:] = bytes([HOLE]) * REGION_SIZE_BYTES
        self.events: dict[Fabric, list[FabricEvent]] = {initiator: [], target: []}
        initiator.watch(self.rank.region)
        self.source: RegionId = initiator.register(self.source_region)
        self.exposed: RegionId = target.register(self.target_region)
        self.exposure: RegionDescriptor = target.expose(self.exposed)
        self.peer: FabricPeerId = initiator.connect(target.address)
        self.remote: RemoteRegionId = initiator.attach(self.peer, self.exposure)

    def close(self) -> None:
        self.initiator.close()
        self.target.close()
        for region in (self.source_region, self.target_region, self.rank.region):
            region.close()

    def pump(self) -> None:
        """Wait shortly for events, and take them."""
        select.select([self.initiator.fileno(), self.target.fileno()], [], [], 0.005)
        for fabric, events in self.events.items():
            events.extend(fabric.poll())

    def wait_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline, f"nothing happened; events so far: {self.events}"
            self.pump()

    def wait_for(self, fabric: Fabric, kind: type[EventT]) -> EventT:
        """The first event of a kind, taken out."""
        found: list[EventT] = []

        def take() -> bool:
            found.extend(event for event in self.events[fabric] if isinstance(event, kind))
            return bool(found)

        self.wait_until(take)
        self.events[fabric].remove(found[0])
        return found[0]

    def settle(self) -> None:
        """Long enough for anything wrong that is under way to show up."""
        until = time.monotonic() + 0.1
        while time.monotonic() < until:
            self.pump()

    def expect(self, immediate: Immediate, num_writes: int, *, record_arrivals: bool = False) -> None:
        deadline_ns = time.monotonic_ns() + int(DEADLINE_S) * NS_PER_S
        self.target.expect(immediate, num_writes, deadline_ns=deadline_ns, record_arrivals=record_arrivals)

    def page_push(
        self,
        push_id: int,
        source_pages: list[int],
        target_pages: list[int],
        *,
        immediate: Immediate,
        num_layers: int = NUM_LAYERS,
        first_tick: int = 0,
        run_bytes: int = PAGE_BYTES,
        source_offset: int = 0,
        target_offset: int = 0,
        target: RemoteRegionId | None = None,
    ) -> PagePush:
        return PagePush(
            push_id=PushId(push_id),
            peer_id=self.peer,
            source=self.source,
            target=self.remote if target is None else target,
            immediate=immediate,
            source_pages=np.array(source_pages, np.uint32),
            target_pages=np.array(target_pages, np.uint32),
            num_layers=num_layers,
            run_bytes=run_bytes,
            source_page_bytes=PAGE_BYTES,
            target_page_bytes=PAGE_BYTES,
            source_layer_bytes=LAYER_BYTES,
            target_layer_bytes=LAYER_BYTES,
            source_offset=source_offset,
            target_offset=target_offset,
            first_tick=first_tick,
        )

    def single_write(self, push_id: int, *, immediate: Immediate, tick: int = 0, num_bytes: int = 4096) -> SingleWrite:
        return SingleWrite(
            push_id=PushId(push_id),
            peer_id=self.peer,
            source=self.source,
            target=self.remote,
            immediate=immediate,
            source_offset=0,
            target_offset=PAGE_BYTES,
            num_bytes=num_bytes,
            tick=tick,
        )

    def source_bytes(self) -> NDArray[np.uint8]:
        return np.frombuffer(bytes(self.source_region.buffer[:KV_BYTES]), np.uint8)

    def target_bytes(self) -> NDArray[np.uint8]:
        return np.frombuffer(bytes(self.target_region.buffer[:KV_BYTES]), np.uint8)

    def flush(self, flush_id: int, *targets: RemoteRegionId, timeout_s: float = 10.0) -> None:
        deadline_ns = time.monotonic_ns() + int(timeout_s * NS_PER_S)
        self.initiator.flush(FlushId(flush_id), self.peer, targets or (self.remote,), deadline_ns=deadline_ns)

    def num_posted(self) -> int:
        return self.initiator.stats().num_writes_posted


def loopback_groups(num_nics_by_group: tuple[int, ...], *, subnet: int) -> tuple[DomainGroup, ...]:
    """Addresses of the loopback interface as NICs."""
    groups: list[DomainGroup] = []
    for group_index, num_nics in enumerate(num_nics_by_group):
        hosts = tuple(f"127.0.{subnet}.{16 * group_index + nic + 1}" for nic in range(num_nics))
        groups.append(DomainGroup(bind_hosts=hosts))
    return tuple(groups)


def open_world(kind: str, *, initiator_nics: tuple[int, ...] = (1,), target_nics: tuple[int, ...] = (1,)) -> World:
    """The NICs are given as their number in each domain group."""
    if kind == "memory":
        network = MemoryNetwork(seed=1, clock=SystemClock())
        return World(network.open(num_nics_by_group=initiator_nics), network.open(num_nics_by_group=target_nics))
    return World(
        NativeFabric(kind, loopback_groups(initiator_nics, subnet=1)),
        NativeFabric(kind, loopback_groups(target_nics, subnet=2)),
    )
