"""A fabric whose every event is the test's decision: it notes what it is asked to do, and reports what it is told."""

from dataclasses import dataclass, field

from pdserve.errors import CapacityError, FabricError
from pdserve.fabric.placement import require_gapless
from pdserve.fabric.port import (
    ExpectationExpired,
    FabricEvent,
    FabricPeerId,
    FabricStats,
    FlushEnded,
    FlushId,
    Landed,
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
from pdserve.shared_region import MemoryRegion, SharedRegion

REGION_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    num_writes: int
    deadline_ns: int
    record_arrivals: bool


@dataclass(slots=True)
class ScriptedFabric:
    provider: str = "scripted"
    address: bytes = b"scripted"
    fenced: list[RegionDescriptor] = field(default_factory=list[RegionDescriptor])
    disconnected: list[FabricPeerId] = field(default_factory=list[FabricPeerId])
    armed: dict[PushId, PagePush | SingleWrite] = field(default_factory=dict[PushId, PagePush | SingleWrite])
    """Pushes that have not ended."""
    cancelled: list[PushId] = field(default_factory=list[PushId])
    attached: dict[RemoteRegionId, RegionDescriptor] = field(default_factory=dict[RemoteRegionId, RegionDescriptor])
    flushes: dict[FlushId, tuple[RemoteRegionId, ...]] = field(
        default_factory=dict[FlushId, tuple[RemoteRegionId, ...]]
    )
    """The targets of flushes that have not ended."""
    expected: dict[Immediate, Expectation] = field(default_factory=dict[Immediate, Expectation])
    forgotten: list[Immediate] = field(default_factory=list[Immediate])
    max_exposures: int = 1000
    """Of all that it ever makes."""
    exposed: list[RegionDescriptor] = field(default_factory=list[RegionDescriptor])
    arm_error: FabricError | CapacityError | None = None
    """Raised by the next `arm` calls, except the first `num_armable`."""
    num_armable: int = 0
    unread: list[FabricEvent] = field(default_factory=list[FabricEvent])
    """What the next `poll` returns."""
    _num_names: int = 0

    # What the test decides

    def push_ends(self, push_id: PushId, outcome: PushOutcome = PushOutcome.DONE, *, errno: int = 0) -> PushEnded:
        push = self.armed.pop(push_id)
        num_layers = push.num_layers if isinstance(push, PagePush) else 1
        times = LayerTimes(computed_ns=1, posted_ns=2, completed_ns=3)
        return PushEnded(push_id=push_id, outcome=outcome, errno=errno, layers=(times,) * num_layers)

    def flush_ends(self, flush_id: FlushId, *, delivered: bool = True) -> FlushEnded:
        del self.flushes[flush_id]
        return FlushEnded(flush_id=flush_id, delivered=delivered, errno=0 if delivered else 110)

    def all_land(self, immediate: Immediate, *, last_ns: int = 0) -> Landed:
        num_writes = self.expected.pop(immediate).num_writes
        return Landed(immediate=immediate, num_writes=num_writes, first_ns=0, last_ns=last_ns, arrivals_ns=())

    def expires(self, immediate: Immediate, *, num_arrived: int = 0) -> ExpectationExpired:
        num_expected = self.expected.pop(immediate).num_writes
        return ExpectationExpired(immediate=immediate, num_arrived=num_arrived, num_expected=num_expected)

    # The port

    def watch(self, counter: SharedRegion) -> None:
        del counter

    def register(self, region: MemoryRegion, *, group_index: int = 0) -> RegionId:
        del region, group_index
        return RegionId(self._new_name())

    def expose(self, region_id: RegionId) -> RegionDescriptor:
        if len(self.exposed) >= self.max_exposures:
            raise FabricError(f"expose: no key for region {region_id}", operation="expose")
        whole = RegionSlice(start=0, num_bytes=REGION_BYTES, base=0, keys=(self._new_name(),))
        self.exposed.append(RegionDescriptor(num_bytes=REGION_BYTES, nics=(0,), slices=(whole,)))
        return self.exposed[-1]

    def fence(self, exposure: RegionDescriptor) -> None:
        self.fenced.append(exposure)

    def connect(self, address: bytes) -> FabricPeerId:
        del address
        return FabricPeerId(self._new_name())

    def disconnect(self, peer_id: FabricPeerId) -> None:
        self.disconnected.append(peer_id)

    def attach(self, peer_id: FabricPeerId, descriptor: RegionDescriptor) -> RemoteRegionId:
        del peer_id
        require_gapless(descriptor)
        target = RemoteRegionId(self._new_name())
        self.attached[target] = descriptor
        return target

    def arm(self, push: PagePush | SingleWrite) -> None:
        if self.arm_error is not None:
            if self.num_armable == 0:
                raise self.arm_error
            self.num_armable -= 1
        self.armed[push.push_id] = push

    def cancel(self, push_id: PushId) -> None:
        self.cancelled.append(push_id)

    def flush(
        self, flush_id: FlushId, peer_id: FabricPeerId, targets: tuple[RemoteRegionId, ...], *, deadline_ns: int
    ) -> None:
        del peer_id, deadline_ns
        self.flushes[flush_id] = targets

    def expect(self, immediate: Immediate, num_writes: int, *, deadline_ns: int, record_arrivals: bool = False) -> None:
        self.expected[immediate] = Expectation(
            num_writes=num_writes, deadline_ns=deadline_ns, record_arrivals=record_arrivals
        )

    def forget(self, immediate: Immediate) -> None:
        self.expected.pop(immediate, None)
        self.forgotten.append(immediate)

    def poll(self) -> list[FabricEvent]:
        events, self.unread = self.unread, []
        return events

    def fileno(self) -> int:
        return -1

    def stats(self) -> FabricStats:
        return FabricStats(
            bytes_posted=0,
            bytes_posted_by_nic=(0,),
            num_writes_posted=0,
            num_writes_completed=0,
            num_writes_failed=0,
            num_in_flight=0,
            num_immediates_received=0,
            num_stale_immediates=0,
            num_armed_pushes=len(self.armed),
        )

    def close(self) -> None:
        self.armed.clear()

    def _new_name(self) -> int:
        self._num_names += 1
        return self._num_names
