"""The fabric port without memory: writes have a number and a duration, and land when both NICs are through with them.

A push goes layer by layer while its pass runs: layer L may go when L + 1 of its ticks are over. It has landed when the
last layer, which is there one tick before the pass ends, has had its time, and not before either NIC has worked off all
bytes of it and of what came before. Local completion and landing are one instant, told as one event a push: the
layers between are not told apart.
"""

from collections.abc import Callable
from dataclasses import dataclass

from pdserve.errors import FabricError
from pdserve.fabric.placement import num_layers_of, num_writes_per_layer
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
from pdserve.layer_counter import ticks_per_pass
from pdserve.shared_region import MemoryRegion, SharedRegion
from pdserve.simulate.agenda import Agenda
from pdserve.simulate.fleet.nic import Nic
from pdserve.units import seconds_to_ns

FLUSH_BYTES = 8


@dataclass(slots=True)
class _Expectation:
    num_writes: int
    deadline_ns: int
    num_arrived: int = 0
    first_ns: int = 0


class FleetFabric:
    """Of one worker, with a NIC for each data parallel rank. What it has to say goes to `on_event`, at once."""

    provider = "fleet"

    def __init__(
        self,
        fabrics: "list[FleetFabric]",
        agenda: Agenda,
        *,
        num_nics: int,
        push_s: Callable[[int], float],
        on_event: Callable[[FabricEvent], None],
    ) -> None:
        """`fabrics` are those of the fleet, which this one joins.

        `push_s`: how long a NIC takes for so many bytes when nothing else is on it.
        """
        self.address = str(len(fabrics)).encode()
        fabrics.append(self)
        self._fabrics = fabrics
        self._agenda = agenda
        self._nics = tuple(Nic() for _ in range(num_nics))
        self._push_s = push_s
        self._on_event = on_event
        self._regions: list[RegionDescriptor] = []
        self._expectations: dict[Immediate, _Expectation] = {}
        self._armed: dict[PushId, PagePush | SingleWrite] = {}
        """For the next pass."""

    def run_pass(self, duration_ns: int) -> None:
        """A pass begins now: what is armed goes as its layers are computed."""
        armed, self._armed = self._armed, {}
        for push in armed.values():
            self._push(push, duration_ns)

    def expire(self) -> None:
        """Give up what should have landed by now."""
        now_ns = self._agenda.now_ns
        overdue = [entry for entry in self._expectations.items() if entry[1].deadline_ns <= now_ns]
        for immediate, expectation in overdue:
            expectation.deadline_ns = 1 << 63
            self._on_event(
                ExpectationExpired(
                    immediate=immediate,
                    num_arrived=expectation.num_arrived,
                    num_expected=expectation.num_writes,
                )
            )

    def arrive(self, immediate: Immediate, num_writes: int) -> None:
        """So many writes are here."""
        expectation = self._expectations.get(immediate)
        if expectation is None:  # nobody waits for them any more
            return
        now_ns = self._agenda.now_ns
        if expectation.num_arrived == 0:
            expectation.first_ns = now_ns
        expectation.num_arrived += num_writes
        if expectation.num_arrived == expectation.num_writes:
            self._on_event(
                Landed(
                    immediate=immediate,
                    num_writes=num_writes,
                    first_ns=expectation.first_ns,
                    last_ns=now_ns,
                    arrivals_ns=(),
                )
            )

    def _push(self, push: PagePush | SingleWrite, duration_ns: int) -> None:
        now_ns = self._agenda.now_ns
        num_layers, num_writes = num_layers_of(push), num_writes_per_layer(push)
        first_ns = last_ns = now_ns + duration_ns
        layer_bytes = 0
        match push:
            case PagePush():
                layer_bytes = num_writes * push.run_bytes
                tick_ns = duration_ns // ticks_per_pass(num_layers)
                first_ns, last_ns = now_ns + tick_ns, now_ns + tick_ns * num_layers
            case SingleWrite():
                layer_bytes = push.num_bytes
        peer = self._fabrics[push.peer_id]
        work_ns = seconds_to_ns(self._push_s(num_layers * layer_bytes))
        landed_ns = max(
            last_ns + seconds_to_ns(self._push_s(layer_bytes)),
            self._nics[self._regions[push.source].nics[0]].carry(start_ns=first_ns, work_ns=work_ns),
            peer.nic_of(push.target).carry(start_ns=first_ns, work_ns=work_ns),
        )
        times = LayerTimes(computed_ns=last_ns, posted_ns=last_ns, completed_ns=landed_ns)
        ended = PushEnded(push_id=push.push_id, outcome=PushOutcome.DONE, errno=0, layers=(times,))

        def land() -> None:
            peer.arrive(push.immediate, num_layers * num_writes)
            self._on_event(ended)

        self._agenda.after(landed_ns - now_ns, land)

    # The port

    def watch(self, counter: SharedRegion) -> None:
        raise FabricError("watch: ticks are told by `run_pass`", operation="watch")

    def register(self, region: MemoryRegion, *, group_index: int = 0) -> RegionId:
        whole = RegionSlice(start=0, num_bytes=region.num_bytes, base=0, keys=(0,))
        self._regions.append(RegionDescriptor(num_bytes=region.num_bytes, nics=(group_index,), slices=(whole,)))
        return RegionId(len(self._regions) - 1)

    def expose(self, region_id: RegionId) -> RegionDescriptor:
        """The same for all peers."""
        return self._regions[region_id]

    def fence(self, exposure: RegionDescriptor) -> None:
        raise FabricError("fence: no worker of a fleet is lost", operation="fence")

    def connect(self, address: bytes) -> FabricPeerId:
        return FabricPeerId(int(address))

    def disconnect(self, peer_id: FabricPeerId) -> None:
        raise FabricError("disconnect: no worker of a fleet is lost", operation="disconnect")

    def attach(self, peer_id: FabricPeerId, descriptor: RegionDescriptor) -> RemoteRegionId:
        return RemoteRegionId(self._fabrics[peer_id].region_index(descriptor))

    def arm(self, push: PagePush | SingleWrite) -> None:
        self._armed[push.push_id] = push

    def cancel(self, push_id: PushId) -> None:
        """What goes already goes on."""
        if self._armed.pop(push_id, None) is not None:
            ended = PushEnded(push_id=push_id, outcome=PushOutcome.CANCELLED, errno=0, layers=())
            self._agenda.after(0, lambda: self._on_event(ended))

    def flush(
        self, flush_id: FlushId, peer_id: FabricPeerId, targets: tuple[RemoteRegionId, ...], *, deadline_ns: int
    ) -> None:
        del peer_id, targets, deadline_ns
        ended = FlushEnded(flush_id=flush_id, delivered=True, errno=0)
        self._agenda.after(seconds_to_ns(self._push_s(FLUSH_BYTES)), lambda: self._on_event(ended))

    def expect(self, immediate: Immediate, num_writes: int, *, deadline_ns: int, record_arrivals: bool = False) -> None:
        del record_arrivals
        self._expectations[immediate] = _Expectation(num_writes, deadline_ns)

    def forget(self, immediate: Immediate) -> None:
        self._expectations.pop(immediate, None)

    def poll(self) -> list[FabricEvent]:
        """Nothing: it was told."""
        return []

    def fileno(self) -> int:
        raise FabricError("fileno: there is nothing to wait for", operation="fileno")

    def stats(self) -> FabricStats:
        raise FabricError("stats: nothing is counted", operation="stats")

    def close(self) -> None:
        """Nothing to give back."""

    # What peers ask

    def region_index(self, descriptor: RegionDescriptor) -> int:
        return next(index for index, region in enumerate(self._regions) if region is descriptor)

    def nic_of(self, region: RemoteRegionId) -> Nic:
        return self._nics[self._regions[region].nics[0]]
