"""What every fabric promises with several NICs and domain groups, on the one in memory and on libfabric over tcp, where
addresses of the loopback interface stand for NICs.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import msgspec
import numpy as np
import pytest
from tests.contract.fabric_world import (
    HOLE,
    KV_BYTES,
    NUM_LAYERS,
    NUM_PAGES,
    PAGE_BYTES,
    REGION_SIZE_BYTES,
    WINDOW_WRITES,
    World,
    immediate_of,
    open_world,
)

from pdserve.errors import FabricError
from pdserve.fabric.port import (
    Fenced,
    FlushEnded,
    FlushId,
    Landed,
    PushEnded,
    PushId,
    PushOutcome,
    RegionDescriptor,
    RegionId,
    RemoteRegionId,
    SingleWrite,
)
from pdserve.shared_region import SharedRegion

KINDS = ["memory", "tcp"]
ALL_PAGES = list(range(NUM_PAGES))


@pytest.fixture(params=KINDS)
def two_nics(request: pytest.FixtureRequest) -> Iterator[World]:
    opened = open_world(request.param, initiator_nics=(2,), target_nics=(2,))
    yield opened
    opened.close()


@dataclass(eq=False)
class SecondGroup:
    """Regions of the second domain group on both sides of a world."""

    world: World

    def __post_init__(self) -> None:
        world = self.world
        self.source_region = SharedRegion.create(name="source 2", num_bytes=REGION_SIZE_BYTES)
        self.target_region = SharedRegion.create(name="target 2", num_bytes=REGION_SIZE_BYTES)
        self.source_region.buffer[:] = bytes([0x22]) * REGION_SIZE_BYTES
        self.target_region.buffer[:] = bytes([HOLE]) * REGION_SIZE_BYTES
        self.source: RegionId = world.initiator.register(self.source_region, group_index=1)
        exposed = world.target.register(self.target_region, group_index=1)
        self.exposure: RegionDescriptor = world.target.expose(exposed)
        self.remote: RemoteRegionId = world.initiator.attach(world.peer, self.exposure)

    def single_write(self, push_id: int) -> SingleWrite:
        write = self.world.single_write(push_id, immediate=immediate_of(1))
        return replace(write, source=self.source, target=self.remote)

    def close(self) -> None:
        self.source_region.close()
        self.target_region.close()


@pytest.fixture(params=KINDS)
def two_groups(request: pytest.FixtureRequest) -> Iterator[SecondGroup]:
    world = open_world(request.param, initiator_nics=(1, 2), target_nics=(2, 1))
    second = SecondGroup(world)
    yield second
    world.close()
    second.close()


def arm_everything(world: World, push_id: int = 1) -> None:
    """Each page of each layer, to the page of the same index."""
    world.initiator.arm(world.page_push(push_id, ALL_PAGES, ALL_PAGES, immediate=immediate_of(1)))
    for _ in range(NUM_LAYERS):
        world.rank.tick()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("initiator_nics", "target_nics"), [((1,), (1,)), ((2,), (2,)), ((2,), (1,)), ((1,), (2,)), ((4,), (2,))]
)
def test_push_over_nics_lands_every_byte_once_and_uses_them_alike(
    kind: str, initiator_nics: tuple[int, ...], target_nics: tuple[int, ...]
) -> None:
    world = open_world(kind, initiator_nics=initiator_nics, target_nics=target_nics)
    num_writes = NUM_PAGES * NUM_LAYERS
    world.expect(immediate_of(1), num_writes)
    arm_everything(world)
    assert world.wait_for(world.target, Landed).num_writes == num_writes
    assert world.wait_for(world.initiator, PushEnded).outcome is PushOutcome.DONE
    assert np.array_equal(world.target_bytes(), world.source_bytes())
    world.settle()
    assert world.target.stats().num_immediates_received == num_writes
    stats = world.initiator.stats()
    assert stats.bytes_posted == KV_BYTES
    assert stats.bytes_posted_by_nic == (KV_BYTES // initiator_nics[0],) * initiator_nics[0]
    assert world.exposure.nics == tuple(range(target_nics[0]))
    world.close()


def test_single_writes_with_a_stride_of_ids_spread_over_all_nics(two_nics: World) -> None:
    world, num_writes = two_nics, 60
    world.expect(immediate_of(1), num_writes)
    for index in range(num_writes):
        world.initiator.arm(world.single_write(2 * index, immediate=immediate_of(1), num_bytes=64))
    world.wait_for(world.target, Landed)
    shares = world.initiator.stats().bytes_posted_by_nic
    assert sum(shares) == 64 * num_writes
    assert min(shares) > max(shares) / 2


def test_writes_in_flight_stay_within_one_window_a_pair(two_nics: World) -> None:
    world = two_nics
    pages = ALL_PAGES * 100
    world.expect(immediate_of(1), len(pages))
    world.initiator.arm(world.page_push(1, pages, pages, immediate=immediate_of(1), num_layers=1))
    world.rank.tick()
    while not any(isinstance(event, Landed) for event in world.events[world.target]):
        assert world.initiator.stats().num_in_flight <= 2 * WINDOW_WRITES
        world.pump()


def test_cancel_over_nics_ends_once_and_its_flush_leaves_nothing_under_way(two_nics: World) -> None:
    world = two_nics
    pages = ALL_PAGES * 200
    world.initiator.arm(world.page_push(1, pages, pages, immediate=immediate_of(1), num_layers=1))
    world.rank.tick()
    world.wait_until(lambda: world.num_posted() > 0)
    world.initiator.cancel(PushId(1))
    world.wait_for(world.initiator, PushEnded)
    num_posted = world.num_posted()
    world.flush(1)
    assert world.wait_for(world.initiator, FlushEnded).delivered
    world.wait_until(lambda: world.target.stats().num_immediates_received == num_posted)
    world.settle()
    assert world.target.stats().num_immediates_received == num_posted
    assert world.events[world.initiator] == []


def test_fence_closes_the_region_on_all_nics_and_says_so_once(two_nics: World) -> None:
    world = two_nics
    world.target.fence(world.exposure)
    assert world.wait_for(world.target, Fenced) == Fenced(exposure=world.exposure)
    arm_everything(world)
    world.settle()
    assert world.events[world.target] == []
    assert np.all(world.target_bytes() == HOLE)
    assert world.target.stats().num_immediates_received == 0


def test_disconnect_over_nics_ends_what_waits_and_the_peer_connected_anew_takes_writes(two_nics: World) -> None:
    world = two_nics
    world.initiator.arm(world.page_push(1, ALL_PAGES, ALL_PAGES, immediate=immediate_of(1)))
    world.initiator.disconnect(world.peer)
    assert world.wait_for(world.initiator, PushEnded).outcome is PushOutcome.CANCELLED
    world.peer = world.initiator.connect(world.target.address)
    world.remote = world.initiator.attach(world.peer, world.exposure)
    world.expect(immediate_of(1), NUM_PAGES * NUM_LAYERS)
    arm_everything(world, push_id=2)
    world.wait_for(world.target, Landed)
    assert np.array_equal(world.target_bytes(), world.source_bytes())


def test_exposures_name_the_nics_of_their_group(two_groups: SecondGroup) -> None:
    assert two_groups.world.exposure.nics == (0, 1)
    assert two_groups.exposure.nics == (2,)


def test_count_over_two_groups_lands_once_when_the_total_has_come(two_groups: SecondGroup) -> None:
    world = two_groups.world
    world.expect(immediate_of(1), 2 * NUM_PAGES * NUM_LAYERS, record_arrivals=True)
    push = world.page_push(2, ALL_PAGES, ALL_PAGES, immediate=immediate_of(1))
    world.initiator.arm(replace(push, source=two_groups.source, target=two_groups.remote))
    arm_everything(world)
    landed = world.wait_for(world.target, Landed)
    assert landed.num_writes == len(landed.arrivals_ns) == 2 * NUM_PAGES * NUM_LAYERS
    assert list(landed.arrivals_ns) == sorted(landed.arrivals_ns)
    assert (landed.arrivals_ns[0], landed.arrivals_ns[-1]) == (landed.first_ns, landed.last_ns)
    assert np.array_equal(world.target_bytes(), world.source_bytes())
    assert two_groups.target_region.buffer[:KV_BYTES] == two_groups.source_region.buffer[:KV_BYTES]
    assert world.initiator.stats().bytes_posted_by_nic == (KV_BYTES, KV_BYTES // 2, KV_BYTES // 2)
    world.settle()
    assert world.events[world.target] == []


def test_groups_cross_where_a_push_asks_for_it(two_groups: SecondGroup) -> None:
    world = two_groups.world
    push = world.page_push(1, ALL_PAGES, ALL_PAGES, immediate=immediate_of(1))
    world.expect(immediate_of(1), NUM_PAGES * NUM_LAYERS)
    world.initiator.arm(replace(push, target=two_groups.remote))
    for _ in range(NUM_LAYERS):
        world.rank.tick()
    world.wait_for(world.target, Landed)
    assert two_groups.target_region.buffer[:KV_BYTES] == world.source_bytes().tobytes()
    assert np.all(world.target_bytes() == HOLE)


def test_flush_over_groups_ends_once_with_everything_delivered(two_groups: SecondGroup) -> None:
    world = two_groups.world
    push = world.page_push(2, ALL_PAGES, ALL_PAGES, immediate=immediate_of(1))
    world.initiator.arm(replace(push, source=two_groups.source, target=two_groups.remote))
    arm_everything(world)
    world.wait_until(lambda: world.num_posted() >= 2 * NUM_PAGES * NUM_LAYERS)
    world.flush(7, world.remote, two_groups.remote)
    ended = world.wait_for(world.initiator, FlushEnded)
    assert ended == FlushEnded(flush_id=FlushId(7), delivered=True, errno=0)
    assert np.array_equal(world.target_bytes(), world.source_bytes())
    assert two_groups.target_region.buffer[:KV_BYTES] == two_groups.source_region.buffer[:KV_BYTES]
    for region in (world.target_region, two_groups.target_region):
        assert bytes(region.buffer[-16:]) == bytes([HOLE]) * 8 + bytes(8)
    world.settle()
    assert not any(isinstance(event, FlushEnded) for event in world.events[world.initiator])


def test_flush_before_any_push_is_delivered(two_groups: SecondGroup) -> None:
    two_groups.world.flush(1)
    assert two_groups.world.wait_for(two_groups.world.initiator, FlushEnded).delivered


def test_flush_without_targets_is_refused(two_nics: World) -> None:
    with pytest.raises(FabricError, match="flush"):
        two_nics.initiator.flush(FlushId(1), two_nics.peer, (), deadline_ns=1 << 62)


def test_failure_in_one_group_fails_the_pushes_of_the_other(two_groups: SecondGroup) -> None:
    world = two_groups.world
    world.initiator.arm(world.page_push(1, ALL_PAGES, ALL_PAGES, immediate=immediate_of(1)))
    world.initiator.arm(two_groups.single_write(2))
    assert world.wait_for(world.initiator, PushEnded).outcome is PushOutcome.DONE
    world.target.fence(two_groups.exposure)
    world.wait_for(world.target, Fenced)
    world.flush(1, two_groups.remote)
    assert not world.wait_for(world.initiator, FlushEnded).delivered
    ended = world.wait_for(world.initiator, PushEnded)
    assert (ended.push_id, ended.outcome) == (1, PushOutcome.FAILED)
    world.initiator.arm(world.page_push(3, [0], [0], immediate=immediate_of(1)))
    assert world.wait_for(world.initiator, PushEnded).outcome is PushOutcome.FAILED


def test_register_with_an_unknown_group_is_refused(two_groups: SecondGroup) -> None:
    with pytest.raises(FabricError, match="group 2"):
        two_groups.world.initiator.register(two_groups.source_region, group_index=2)


@pytest.mark.parametrize(
    "changes",
    [
        {"nics": ()},
        {"nics": (0,)},
        {"nics": (0, 0)},
        {"nics": (0, 2)},
        {"nics": (-1, 0)},
        {"nics": (0, 1 << 40)},
        {"keys": ()},
        {"keys": (1,)},
        {"keys": (1, 2, 3)},
    ],
)
def test_attach_with_nics_or_keys_that_do_not_fit_is_refused(
    two_nics: World, changes: dict[str, tuple[int, ...]]
) -> None:
    good = two_nics.exposure
    part = msgspec.structs.replace(good.slices[0], keys=changes.get("keys", good.slices[0].keys))
    bad = msgspec.structs.replace(good, nics=changes.get("nics", good.nics), slices=(part,))
    with pytest.raises(FabricError) as refused:
        two_nics.initiator.attach(two_nics.peer, bad)
    assert refused.value.operation == "attach"


def test_connect_to_any_part_of_an_address_is_refused(two_nics: World) -> None:
    address = two_nics.target.address
    for num_bytes in range(len(address)):
        with pytest.raises(FabricError):
            two_nics.initiator.connect(address[:num_bytes])
    with pytest.raises(FabricError):
        two_nics.initiator.connect(address + b"\x00")


def test_page_push_begins_each_layer_at_the_first_pair(two_nics: World) -> None:
    world = two_nics
    world.expect(immediate_of(1), 3)
    world.initiator.arm(world.page_push(1, [0], [0], immediate=immediate_of(1)))
    for _ in range(NUM_LAYERS):
        world.rank.tick()
    world.wait_for(world.target, Landed)
    assert world.initiator.stats().bytes_posted_by_nic == (NUM_LAYERS * PAGE_BYTES, 0)
