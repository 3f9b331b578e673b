"""The fabric port over libfabric: checks and types here, everything that moves data in `native/fabric/`."""

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, assert_never

from pdserve.config.environment import keep_crash_handlers_ours, keep_endpoints_small
from pdserve.errors import FabricError
from pdserve.fabric.port import (
    DomainGroup,
    ExpectationExpired,
    FabricEvent,
    FabricPeerId,
    FabricStats,
    Fenced,
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
from pdserve.shared_region import MemoryRegion, RegionKind, SharedRegion

if TYPE_CHECKING:
    from pdserve import _fabric

    NativeEvent = _fabric.PushEnded | _fabric.FlushEnded | _fabric.Landed | _fabric.ExpectationExpired | _fabric.Fenced

logger = logging.getLogger(__name__)

DEFAULT_GROUPS = (DomainGroup(bind_hosts=("127.0.0.1",)),)
"""Reachable from this machine alone: whoever wants more names the interfaces."""

SliceTuples = list[tuple[int, int, int, list[int]]]


class NativeFabric:
    """A `Fabric` of one libfabric provider: `tcp` or `shm`; `efa` and `verbs` take the same path, untested on hardware.

    Registers CUDA regions, untested on hardware too, when it is opened with `device_memory`.
    Threads: call from one thread; the worker thread of each group, and its watcher thread once there is a counter,
    never take the GIL.
    """

    def __init__(
        self,
        provider: str,
        groups: Sequence[DomainGroup] = DEFAULT_GROUPS,
        *,
        device_memory: bool = False,
        max_slice_bytes: int | None = None,
    ) -> None:
        """Open the provider on the NICs of all groups.

        Raises: `FabricError` when libfabric, the provider or a NIC is not available, a thread can't be pinned, or the
        provider can't reach the device memory that is asked for.
        """
        self._module = _load()
        self._provider = provider
        self._engine = self._module.Engine(
            provider,
            groups=[(group.bind_hosts, group.cpus) for group in groups],
            max_slice_bytes=max_slice_bytes or self._module.MAX_SLICE_BYTES,
            device_memory=device_memory,
        )
        # Registered memory must stay mapped as long as the engine may read it.
        self._regions: list[MemoryRegion] = []
        major, minor = self._module.libfabric_version()
        num_nics = sum(len(group.bind_hosts) for group in groups)
        logger.info(
            "fabric_opened provider=%s groups=%d nics=%d libfabric=%d.%d", provider, len(groups), num_nics, major, minor
        )

    @property
    def provider(self) -> str:
        return self._provider

    @property
    def address(self) -> bytes:
        return self._engine.address

    def watch(self, counter: SharedRegion) -> None:
        self._engine.watch(counter.address, counter.num_bytes)
        self._regions.append(counter)

    def register(self, region: MemoryRegion, *, group_index: int = 0) -> RegionId:
        region_id = self._engine.register(
            region.address, region.num_bytes, cuda_device=_cuda_device_of(region), group_index=group_index
        )
        self._regions.append(region)
        return RegionId(region_id)

    def expose(self, region_id: RegionId) -> RegionDescriptor:
        nics, slices = self._engine.expose(region_id)
        return _to_descriptor(nics, slices)

    def fence(self, exposure: RegionDescriptor) -> None:
        self._engine.fence(exposure.num_bytes, exposure.nics, _to_tuples(exposure))

    def connect(self, address: bytes) -> FabricPeerId:
        return FabricPeerId(self._engine.connect(address))

    def disconnect(self, peer_id: FabricPeerId) -> None:
        self._engine.disconnect(peer_id)

    def attach(self, peer_id: FabricPeerId, descriptor: RegionDescriptor) -> RemoteRegionId:
        try:
            target = self._engine.attach(peer_id, descriptor.num_bytes, descriptor.nics, _to_tuples(descriptor))
        except TypeError as error:
            raise FabricError("attach: a number is negative or has over 64 bits", operation="attach") from error
        return RemoteRegionId(target)

    def arm(self, push: PagePush | SingleWrite) -> None:
        match push:
            case PagePush():
                self._engine.arm_pages(
                    push_id=push.push_id,
                    peer_id=push.peer_id,
                    source=push.source,
                    target=push.target,
                    immediate=push.immediate,
                    source_pages=push.source_pages,
                    target_pages=push.target_pages,
                    num_layers=push.num_layers,
                    run_bytes=push.run_bytes,
                    source_page_bytes=push.source_page_bytes,
                    target_page_bytes=push.target_page_bytes,
                    source_layer_bytes=push.source_layer_bytes,
                    target_layer_bytes=push.target_layer_bytes,
                    source_offset=push.source_offset,
                    target_offset=push.target_offset,
                    first_tick=push.first_tick,
                )
            case SingleWrite():
                self._engine.arm_single(
                    push_id=push.push_id,
                    peer_id=push.peer_id,
                    source=push.source,
                    target=push.target,
                    immediate=push.immediate,
                    source_offset=push.source_offset,
                    target_offset=push.target_offset,
                    num_bytes=push.num_bytes,
                    tick=push.tick,
                )
            case _:
                assert_never(push)

    def cancel(self, push_id: PushId) -> None:
        self._engine.cancel(push_id)

    def flush(
        self, flush_id: FlushId, peer_id: FabricPeerId, targets: tuple[RemoteRegionId, ...], *, deadline_ns: int
    ) -> None:
        self._engine.flush(flush_id, peer_id, targets, deadline_ns=deadline_ns)

    def expect(self, immediate: Immediate, num_writes: int, *, deadline_ns: int, record_arrivals: bool = False) -> None:
        self._engine.expect(immediate, num_writes, deadline_ns=deadline_ns, record_arrivals=record_arrivals)

    def forget(self, immediate: Immediate) -> None:
        self._engine.forget(immediate)

    def poll(self) -> list[FabricEvent]:
        return [self._to_event(event) for event in self._engine.poll()]

    def fileno(self) -> int:
        return self._engine.fileno()

    def stats(self) -> FabricStats:
        engine = self._engine
        bytes_posted_by_nic = tuple(engine.bytes_posted_by_nic)
        return FabricStats(
            bytes_posted=sum(bytes_posted_by_nic),
            bytes_posted_by_nic=bytes_posted_by_nic,
            num_writes_posted=engine.num_writes_posted,
            num_writes_completed=engine.num_writes_completed,
            num_writes_failed=engine.num_writes_failed,
            num_in_flight=engine.num_in_flight,
            num_immediates_received=engine.num_immediates_received,
            num_stale_immediates=engine.num_stale_immediates,
            num_armed_pushes=engine.num_armed_pushes,
        )

    def close(self) -> None:
        if self._engine.close():
            self._regions.clear()
        else:
            logger.error("fabric_close_hung provider=%s", self._provider)

    def _to_event(self, event: "NativeEvent") -> FabricEvent:
        native = self._module
        match event:
            case native.PushEnded():
                layers = tuple(
                    LayerTimes(
                        computed_ns=layer.computed_ns, posted_ns=layer.posted_ns, completed_ns=layer.completed_ns
                    )
                    for layer in event.layers
                )
                outcome = PushOutcome[event.outcome.name]
                return PushEnded(push_id=PushId(event.push_id), outcome=outcome, errno=event.error, layers=layers)
            case native.FlushEnded():
                return FlushEnded(flush_id=FlushId(event.flush_id), delivered=event.delivered, errno=event.error)
            case native.Landed():
                return Landed(
                    immediate=Immediate(event.immediate),
                    num_writes=event.num_writes,
                    first_ns=event.first_ns,
                    last_ns=event.last_ns,
                    arrivals_ns=tuple(event.arrivals_ns),
                )
            case native.ExpectationExpired():
                return ExpectationExpired(
                    immediate=Immediate(event.immediate),
                    num_arrived=event.num_arrived,
                    num_expected=event.num_expected,
                )
            case native.Fenced():
                return Fenced(exposure=_to_descriptor(event.nics, event.slices))
            case _:
                assert_never(event)


def _load():  # The inferred type is the module itself, so that its calls are checked.
    """The native module. Raises: `FabricError` when it was not built, or libfabric is not installed."""
    keep_crash_handlers_ours()
    keep_endpoints_small()
    try:
        from pdserve import _fabric
    except ImportError as error:
        raise FabricError(
            f"the native fabric can't be loaded ({error}); install libfabric "
            "(Debian and Ubuntu: apt-get install libfabric-dev) and build pdserve (make setup)",
            operation="load",
        ) from error
    return _fabric


def _cuda_device_of(region: MemoryRegion) -> int | None:
    match region.kind:
        case RegionKind.HOST:
            return None
        case RegionKind.CUDA:
            return region.device_index
        case _:
            assert_never(region.kind)


def _to_descriptor(nics: list[int], slices: SliceTuples) -> RegionDescriptor:
    return RegionDescriptor(
        num_bytes=sum(num_bytes for _, num_bytes, _, _ in slices),
        nics=tuple(nics),
        slices=tuple(
            RegionSlice(start=start, num_bytes=num_bytes, base=base, keys=tuple(keys))
            for start, num_bytes, base, keys in slices
        ),
    )


def _to_tuples(descriptor: RegionDescriptor) -> SliceTuples:
    return [(part.start, part.num_bytes, part.base, list(part.keys)) for part in descriptor.slices]
