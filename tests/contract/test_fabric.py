"""What every fabric promises, on the one in memory and on libfabric over tcp and shm; with several NICs, see
`test_fabric_nics.py`.
"""

import errno
import select
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import pytest
from tests.contract.fabric_world import (
    DEADLINE_S,
    HOLE,
    KV_BYTES,
    LAYER_BYTES,
    NUM_LAYERS,
    NUM_PAGES,
    PAGE_BYTES,
    WINDOW_WRITES,
    World,
    immediate_of,
    open_world,
)

from pdserve.engine.cuda_region import CudaRegion
from pdserve.errors import CapacityError, FabricError
from pdserve.fabric.port import (
    ExpectationExpired,
    Fenced,
    FlushEnded,
    FlushId,
    Landed,
    PushEnded,
    PushId,
    PushOutcome,
    RegionDescriptor,
    RegionSlice,
    RemoteRegionId,
    SingleWrite,
)
from pdserve.units import NS_PER_MS


@pytest.fixture(params=["memory", "tcp", "shm"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    opened = open_world(request.param)
    yield opened
    opened.close()


def test_page_push_all_layers_lands_byte_exact_and_leaves_holes(world: World) -> None:
    source_pages, target_pages = [1, 3, 8, 15], [9, 0, 4, 2]
    expected = np.full(KV_BYTES, HOLE, np.uint8)
    source = world.source_bytes()
    for layer_index in range(NUM_LAYERS):
        for source_page, target_page in zip(source_pages, target_pages, strict=True):
            source_start = layer_index * LAYER_BYTES + source_page * PAGE_BYTES
            target_start = layer_index * LAYER_BYTES + target_page * PAGE_BYTES
            expected[target_start : target_start + PAGE_BYTES] = source[source_start : source_start + PAGE_BYTES]
    world.expect(immediate_of(1), 12)
    world.initiator.arm(world.page_push(1, source_pages, target_pages, immediate=immediate_of(1)))
    for _ in range(NUM_LAYERS):
        world.rank.tick()
    landed = world.wait_for(world.target, Landed)
    assert (landed.immediate, landed.num_writes) == (immediate_of(1), 12)
    assert landed.first_ns <= landed.last_ns
    assert np.array_equal(world.target_bytes(), expected)
    assert world.wait_for(world.initiator, PushEnded).outcome is PushOutcome.DONE


def test_page_push_of_a_head_range_writes_that_run_alone(world: World) -> None:
    push = world.page_push(
        1, [2], [5], immediate=immediate_of(1), num_layers=1, run_bytes=1024, source_offset=512, target_offset=3072
    )
    world.expect(immediate_of(1), 1)
    world.initiator.arm(push)
    world.rank.tick()
    world.wait_for(world.target, Landed)
    expected = np.full(KV_BYTES, HOLE, np.uint8)
    target_start = 5 * PAGE_BYTES + 3072
    source_start = 2 * PAGE_BYTES + 512
    expected[target_start : target_start + 1024] = world.source_bytes()[source_start : source_start + 1024]
    assert np.array_equal(world.target_bytes(), expected)


def test_page_push_without_pages_ends_at_once(world: World) -> None:
    world.initiator.arm(world.page_push(1, [], [], immediate=immediate_of(1)))
    assert world.wait_for(world.initiator, PushEnded).outcome is PushOutcome.DONE
    assert world.num_posted() == 0


@pytest.mark.parametrize("num_bytes", [8, 4096, PAGE_BYTES * 4])
def test_single_write_without_tick_lands_at_once(world: World, num_bytes: int) -> None:
    world.expect(immediate_of(1), 1)
    world.initiator.arm(world.single_write(1, immediate=immediate_of(1), num_bytes=num_bytes))
    world.wait_for(world.target, Landed)
    landed = world.target_bytes()[PAGE_BYTES : PAGE_BYTES + num_bytes]
    assert np.array_equal(landed, world.source_bytes()[:num_bytes])
    assert world.wait_for(world.initiator, PushEnded).outcome is PushOutcome.DONE


def test_single_write_with_tick_waits_for_it(world: World) -> None:
    world.initiator.arm(world.single_write(1, immediate=immediate_of(1), tick=2))
    world.rank.tick()
    world.settle()
    assert world.num_posted() == 0
    world.rank.tick()
    world.wait_for(world.initiator, PushEnded)


def test_push_layers_are_posted_in_step_with_ticks_and_not_before(world: World) -> None:
    world.rank.tick()
    world.initiator.arm(world.page_push(1, [0, 1], [0, 1], immediate=immediate_of(1), first_tick=2))
    world.rank.tick()
    ticked_ns: list[int] = []
    for layer_index in range(NUM_LAYERS):
        world.settle()
        assert world.num_posted() == 2 * layer_index
        ticked_ns.append(world.rank.tick())
        num_due = 2 * (layer_index + 1)
        world.wait_until(lambda num_due=num_due: world.num_posted() == num_due)
    layers = world.wait_for(world.initiator, PushEnded).layers
    assert [layer.computed_ns for layer in layers] == ticked_ns
    assert all(0 < layer.computed_ns <= layer.posted_ns <= layer.completed_ns for layer in layers)


def test_push_armed_after_its_ticks_is_posted_at_once(world: World) -> None:
    for _ in range(NUM_LAYERS):
        world.rank.tick()
    world.initiator.arm(world.page_push(1, [0], [0], immediate=immediate_of(1)))
    assert world.wait_for(world.initiator, PushEnded).outcome is PushOutcome.DONE


@pytest.mark.parametrize(
    ("source_pages", "target_pages", "layout"),
    [
        ([NUM_PAGES], [0], {}),
        ([0], [NUM_PAGES], {"run_bytes": PAGE_BYTES}),
        ([0], [0], {"num_layers": NUM_LAYERS + 1}),
        ([NUM_PAGES - 1], [0], {"source_offset": 1 + 4096}),
        ([0], [NUM_PAGES - 1], {"target_offset": 1 + 4096}),
        ([2], [0], {"source_page_bytes": 1 << 63}),
        ([0, 1], [0], {}),
        ([0], [0], {"run_bytes": 0}),
    ],
)
def test_push_outside_a_region_is_refused_and_nothing_is_armed(
    world: World, source_pages: list[int], target_pages: list[int], layout: dict[str, int]
) -> None:
    push = replace(world.page_push(1, source_pages, target_pages, immediate=immediate_of(1)), **layout)
    with pytest.raises(FabricError) as refused:
        world.initiator.arm(push)
    assert refused.value.operation == "arm"
    assert world.initiator.stats().num_armed_pushes == 0
    for _ in range(NUM_LAYERS + 1):
        world.rank.tick()
    world.settle()
    assert world.num_posted() == 0


def test_push_with_unknown_names_is_refused(world: World) -> None:
    other_peer = world.initiator.connect(world.target.address)
    foreign = world.initiator.attach(other_peer, world.exposure)
    with pytest.raises(FabricError, match="region"):
        world.initiator.arm(world.page_push(1, [0], [0], immediate=immediate_of(1), target=foreign))
    with pytest.raises(FabricError, match="region"):
        world.initiator.arm(world.page_push(1, [0], [0], immediate=immediate_of(1), target=RemoteRegionId(999)))


def test_push_id_in_use_is_refused(world: World) -> None:
    world.initiator.arm(world.page_push(1, [0], [0], immediate=immediate_of(1)))
    with pytest.raises(FabricError, match="not ended"):
        world.initiator.arm(world.page_push(1, [0], [0], immediate=immediate_of(1)))


def test_arming_beyond_the_bound_is_refused_with_a_time_to_come_back(world: World) -> None:
    push = world.page_push(0, [0], [0], immediate=immediate_of(1))
    with pytest.raises(CapacityError) as refused:
        for push_id in range(5000):
            world.initiator.arm(world.page_push(push_id, [0], [0], immediate=push.immediate))
    assert refused.value.retry_after_s > 0


@pytest.mark.parametrize(
    "slices",
    [
        (),
        ((0, 4096), (8192, 4096)),
        ((0, 4096), (2048, 6144)),
        ((0, 4096),),
        ((0, 8192), (8192, 0)),
    ],
)
def test_attach_with_gaps_or_overlap_is_refused(world: World, slices: tuple[tuple[int, int], ...]) -> None:
    descriptor = RegionDescriptor(
        num_bytes=8192,
        nics=(0,),
        slices=tuple(RegionSlice(start=start, num_bytes=num_bytes, base=0, keys=(1,)) for start, num_bytes in slices),
    )
    with pytest.raises(FabricError, match="attach"):
        world.initiator.attach(world.peer, descriptor)


@pytest.mark.parametrize("address", [b"", b"nonsense", b"\x00" * 16])
def test_connect_to_a_malformed_address_is_refused(world: World, address: bytes) -> None:
    with pytest.raises(FabricError):
        world.initiator.connect(address)


def test_landed_counts_arrivals_from_before_expect(world: World) -> None:
    world.initiator.arm(world.single_write(1, immediate=immediate_of(1)))
    world.wait_until(lambda: world.target.stats().num_immediates_received == 1)
    world.initiator.arm(world.single_write(2, immediate=immediate_of(1)))
    world.wait_until(lambda: world.target.stats().num_immediates_received == 2)
    world.expect(immediate_of(1), 2)
    assert world.wait_for(world.target, Landed).num_writes == 2


def test_landed_with_recording_has_one_instant_a_write(world: World) -> None:
    world.expect(immediate_of(1), 6, record_arrivals=True)
    world.initiator.arm(world.page_push(1, [0, 1], [0, 1], immediate=immediate_of(1)))
    for _ in range(NUM_LAYERS):
        world.rank.tick()
    landed = world.wait_for(world.target, Landed)
    assert len(landed.arrivals_ns) == 6
    assert list(landed.arrivals_ns) == sorted(landed.arrivals_ns)
    assert (landed.arrivals_ns[0], landed.arrivals_ns[-1]) == (landed.first_ns, landed.last_ns)


def test_arrivals_of_a_closed_generation_are_dropped_and_counted(world: World) -> None:
    world.target.forget(immediate_of(1, 5))
    for push_id, generation in enumerate([5, 4, 4095, 6]):
        world.initiator.arm(world.single_write(push_id, immediate=immediate_of(1, generation)))
    world.wait_until(lambda: world.target.stats().num_immediates_received == 4)
    assert world.target.stats().num_stale_immediates == 3
    world.expect(immediate_of(1, 6), 1)
    assert world.wait_for(world.target, Landed).immediate == immediate_of(1, 6)


def test_expect_of_a_closed_generation_or_twice_is_refused(world: World) -> None:
    world.target.forget(immediate_of(1, 5))
    with pytest.raises(FabricError, match="closed"):
        world.expect(immediate_of(1, 5), 1)
    world.expect(immediate_of(1, 6), 1)
    with pytest.raises(FabricError, match="already"):
        world.expect(immediate_of(1, 6), 1)


def test_expectation_past_its_deadline_expires_with_what_came(world: World) -> None:
    world.initiator.arm(world.single_write(1, immediate=immediate_of(1)))
    world.wait_until(lambda: world.target.stats().num_immediates_received == 1)
    world.target.expect(immediate_of(1), 2, deadline_ns=time.monotonic_ns() + 50 * NS_PER_MS)
    expired = world.wait_for(world.target, ExpectationExpired)
    assert (expired.num_arrived, expired.num_expected) == (1, 2)
    world.expect(immediate_of(1), 2)
    world.initiator.arm(world.single_write(2, immediate=immediate_of(1)))
    assert world.wait_for(world.target, Landed).num_writes == 2


def test_forget_ends_an_expectation_without_event(world: World) -> None:
    world.target.expect(immediate_of(1), 1, deadline_ns=time.monotonic_ns() + 20 * NS_PER_MS)
    world.target.forget(immediate_of(1))
    world.settle()
    assert world.events[world.target] == []


def test_cancel_between_layers_ends_once_and_posts_no_more(world: World) -> None:
    world.initiator.arm(world.page_push(1, [0, 1, 2], [0, 1, 2], immediate=immediate_of(1)))
    world.rank.tick()
    world.wait_until(lambda: world.num_posted() == 3)
    world.initiator.cancel(PushId(1))
    world.initiator.cancel(PushId(1))
    ended = world.wait_for(world.initiator, PushEnded)
    assert ended.outcome is PushOutcome.CANCELLED
    assert [layer.posted_ns > 0 for layer in ended.layers] == [True, False, False]
    world.rank.tick()
    world.rank.tick()
    world.settle()
    assert world.num_posted() == 3
    assert world.events[world.initiator] == []


def test_cancel_of_a_push_that_has_ended_does_nothing(world: World) -> None:
    world.initiator.arm(world.single_write(1, immediate=immediate_of(1)))
    assert world.wait_for(world.initiator, PushEnded).outcome is PushOutcome.DONE
    world.initiator.cancel(PushId(1))
    world.settle()
    assert world.events[world.initiator] == []


def test_cancel_while_posting_drains_what_was_posted(world: World) -> None:
    pages = list(range(NUM_PAGES)) * 200
    world.initiator.arm(world.page_push(1, pages, pages, immediate=immediate_of(1), num_layers=1))
    world.rank.tick()
    world.wait_until(lambda: world.num_posted() > 0)
    world.initiator.cancel(PushId(1))
    world.wait_for(world.initiator, PushEnded)
    stats = world.initiator.stats()
    assert stats.num_in_flight == 0
    assert stats.num_writes_completed == stats.num_writes_posted
    world.flush(1)
    assert world.wait_for(world.initiator, FlushEnded).delivered
    world.wait_until(lambda: world.target.stats().num_immediates_received == stats.num_writes_posted)
    world.settle()
    assert world.target.stats().num_immediates_received == stats.num_writes_posted


def test_writes_in_flight_stay_within_the_window(world: World) -> None:
    pages = list(range(NUM_PAGES)) * 100
    world.expect(immediate_of(1), len(pages))
    world.initiator.arm(world.page_push(1, pages, pages, immediate=immediate_of(1), num_layers=1))
    world.rank.tick()
    while not any(isinstance(event, Landed) for event in world.events[world.target]):
        assert world.initiator.stats().num_in_flight <= WINDOW_WRITES
        world.pump()


def test_flush_proves_delivery_and_counts_as_no_arrival(world: World) -> None:
    world.initiator.arm(world.page_push(1, [0, 1], [0, 1], immediate=immediate_of(1), num_layers=1))
    world.rank.tick()
    world.wait_until(lambda: world.num_posted() == 2)
    world.flush(7)
    ended = world.wait_for(world.initiator, FlushEnded)
    assert ended == FlushEnded(flush_id=FlushId(7), delivered=True, errno=0)
    assert np.array_equal(world.target_bytes()[: 2 * PAGE_BYTES], world.source_bytes()[: 2 * PAGE_BYTES])
    assert bytes(world.target_region.buffer[-16:]) == bytes([HOLE]) * 8 + bytes(8)
    world.settle()
    assert world.target.stats().num_immediates_received == 2


def test_flush_past_its_deadline_is_not_delivered(world: World) -> None:
    world.flush(1, timeout_s=-1.0)
    ended = world.wait_for(world.initiator, FlushEnded)
    world.settle()
    assert world.events[world.initiator] == []
    assert ended.delivered or ended.errno == errno.ETIMEDOUT


def test_write_after_the_fence_does_not_land(world: World) -> None:
    world.target.fence(world.exposure)
    assert world.wait_for(world.target, Fenced) == Fenced(exposure=world.exposure)
    world.initiator.arm(world.page_push(1, [0, 1], [0, 1], immediate=immediate_of(1), num_layers=1))
    world.rank.tick()
    world.settle()
    assert np.all(world.target_bytes() == HOLE)
    assert world.target.stats().num_immediates_received == 0


def test_fence_of_one_exposure_leaves_another_open(world: World) -> None:
    second = world.target.expose(world.exposed)
    assert second != world.exposure
    world.target.fence(second)
    world.expect(immediate_of(1), 1)
    world.initiator.arm(world.single_write(1, immediate=immediate_of(1)))
    world.wait_for(world.target, Landed)
    with pytest.raises(FabricError, match="fence"):
        world.target.fence(second)


def test_disconnect_ends_what_waits_for_ticks_and_refuses_more(world: World) -> None:
    world.initiator.arm(world.page_push(1, [0], [0], immediate=immediate_of(1)))
    world.initiator.disconnect(world.peer)
    assert world.wait_for(world.initiator, PushEnded).outcome is PushOutcome.CANCELLED
    with pytest.raises(FabricError):
        world.initiator.arm(world.page_push(2, [0], [0], immediate=immediate_of(1)))


def test_peer_connected_again_takes_writes(world: World) -> None:
    world.initiator.arm(world.single_write(1, immediate=immediate_of(1)))
    world.wait_for(world.initiator, PushEnded)
    world.initiator.disconnect(world.peer)
    world.peer = world.initiator.connect(world.target.address)
    world.remote = world.initiator.attach(world.peer, world.exposure)
    world.expect(immediate_of(1), 2)
    world.initiator.arm(world.single_write(2, immediate=immediate_of(1)))
    assert world.wait_for(world.target, Landed).num_writes == 2


def test_descriptor_is_readable_exactly_while_an_event_waits(world: World) -> None:
    def is_readable() -> bool:
        return bool(select.select([world.initiator.fileno()], [], [], 0)[0])

    assert not is_readable()
    world.initiator.arm(world.single_write(1, immediate=immediate_of(1)))
    deadline = time.monotonic() + DEADLINE_S
    while not is_readable():
        assert time.monotonic() < deadline
    assert [type(event) for event in world.initiator.poll()] == [PushEnded]
    assert not is_readable()


def test_watch_of_a_second_counter_is_refused(world: World) -> None:
    with pytest.raises(FabricError, match="watch"):
        world.initiator.watch(world.rank.region)


def test_register_of_device_memory_that_it_can_not_reach_is_refused(world: World) -> None:
    unmapped = CudaRegion(fd=-1, num_bytes=KV_BYTES, address=4096, device_index=0, undo=ExitStack())
    with pytest.raises(FabricError) as refused:
        world.target.register(unmapped)
    assert refused.value.operation == "register"


def test_push_that_waits_for_ticks_without_a_counter_is_refused(world: World) -> None:
    back = world.target.connect(world.initiator.address)
    remote = world.target.attach(back, world.initiator.expose(world.source))
    push = SingleWrite(
        push_id=PushId(1),
        peer_id=back,
        source=world.exposed,
        target=remote,
        immediate=immediate_of(1),
        source_offset=0,
        target_offset=0,
        num_bytes=8,
        tick=1,
    )
    with pytest.raises(FabricError, match="layer counter"):
        world.target.arm(push)
