"""A revoked key: what lands under it, and what the writer sees of it."""

from collections.abc import Iterator

import numpy as np
import pytest
from tests.contract.fabric_world import (
    HOLE,
    NUM_PAGES,
    REGION_SIZE_BYTES,
    WINDOW_WRITES,
    World,
    immediate_of,
    open_world,
)

from pdserve.fabric.port import Fenced, FlushEnded, Landed, PushEnded, PushOutcome


@pytest.fixture(params=["memory", "tcp"])
def told_world(request: pytest.FixtureRequest) -> Iterator[World]:
    """Of fabrics whose writer is told. Over shm it is not: what it writes never completes, and its flush times out."""
    opened = open_world(request.param)
    yield opened
    opened.close()


@pytest.fixture(params=["tcp", "shm"])
def native_world(request: pytest.FixtureRequest) -> Iterator[World]:
    """The one in memory has a test by seeds, `test_nothing_lands_after_fenced`."""
    opened = open_world(request.param)
    yield opened
    opened.close()


def fence(world: World) -> None:
    world.target.fence(world.exposure)
    world.wait_for(world.target, Fenced)


def empty_target(world: World) -> None:
    world.target_region.buffer[:] = bytes([HOLE]) * REGION_SIZE_BYTES


def write_once(world: World, push_id: int) -> PushOutcome:
    world.initiator.arm(world.single_write(push_id, immediate=immediate_of(push_id)))
    return world.wait_for(world.initiator, PushEnded).outcome


@pytest.mark.parametrize("wrote_before", [False, True])
def test_writer_with_a_revoked_key_lands_nothing_and_is_told_by_its_flush(
    told_world: World, *, wrote_before: bool
) -> None:
    """Over tcp the push itself may end as done: the bytes left, which says nothing of where they went."""
    if wrote_before:
        assert write_once(told_world, 1) is PushOutcome.DONE
        told_world.wait_until(lambda: told_world.target.stats().num_immediates_received == 1)
    fence(told_world)
    empty_target(told_world)
    told_world.initiator.arm(told_world.page_push(2, [0, 1], [0, 1], immediate=immediate_of(2), num_layers=1))
    told_world.rank.tick()
    assert told_world.wait_for(told_world.initiator, PushEnded).outcome in (PushOutcome.DONE, PushOutcome.FAILED)
    told_world.flush(1)
    flushed = told_world.wait_for(told_world.initiator, FlushEnded)
    assert not flushed.delivered
    assert flushed.errno != 0
    assert write_once(told_world, 3) is PushOutcome.FAILED
    told_world.settle()
    assert np.all(told_world.target_bytes() == HOLE)
    assert told_world.target.stats().num_immediates_received == int(wrote_before)


def test_writer_whose_key_was_revoked_comes_back_with_a_new_one(told_world: World) -> None:
    fence(told_world)
    write_once(told_world, 1)
    told_world.initiator.disconnect(told_world.peer)
    told_world.peer = told_world.initiator.connect(told_world.target.address)
    told_world.remote = told_world.initiator.attach(told_world.peer, told_world.target.expose(told_world.exposed))
    told_world.expect(immediate_of(2), 1)
    assert write_once(told_world, 2) is PushOutcome.DONE
    told_world.wait_for(told_world.target, Landed)


def test_nothing_lands_after_the_fence_though_the_writer_goes_on(native_world: World) -> None:
    """The pages are given to another request as soon as the fence is reported (rule H2)."""
    pages = list(range(NUM_PAGES)) * 4000
    native_world.initiator.arm(native_world.page_push(1, pages, pages, immediate=immediate_of(1), num_layers=1))
    native_world.rank.tick()
    native_world.wait_until(lambda: native_world.num_posted() > 4 * WINDOW_WRITES)
    fence(native_world)
    empty_target(native_world)
    num_received = native_world.target.stats().num_immediates_received
    native_world.settle()
    assert np.all(native_world.target_bytes() == HOLE)
    assert native_world.target.stats().num_immediates_received == num_received < len(pages)
