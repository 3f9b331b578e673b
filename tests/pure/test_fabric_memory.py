"""The in-process network under seeded faults: what the rules H1 to H3 rest on holds whatever it draws."""

import errno
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.clock import VirtualClock
from pdserve.fabric.memory import MemoryFabric, MemoryFaults, MemoryNetwork
from pdserve.fabric.port import (
    ExpectationExpired,
    FabricEvent,
    Fenced,
    FlushEnded,
    FlushId,
    Landed,
    PagePush,
    PushEnded,
    PushId,
    PushOutcome,
)
from pdserve.ids import Immediate
from pdserve.layer_counter import REGION_BYTES
from pdserve.shared_region import SharedRegion
from pdserve.units import NS_PER_MS, NS_PER_S

PAGE_BYTES = 64
NUM_PAGES = 80
PUSHED_BYTES = PAGE_BYTES * NUM_PAGES
FILL, HOLE, REUSED = 0x11, 0xEE, 0x99
MAX_DELAY_NS = 5 * NS_PER_MS

FAULTS = st.builds(
    MemoryFaults,
    min_delay_ns=st.just(0),
    max_delay_ns=st.sampled_from([0, 1000, MAX_DELAY_NS]),
    reorder=st.booleans(),
    write_failure_probability=st.sampled_from([0.0, 0.02]),
)


NICS = st.tuples(st.integers(1, 3), st.integers(1, 3))
"""Of the initiator and of the target."""


class Pair:
    """An initiator and a target on a virtual clock, with one push of 80 pages, more than a window, at hand."""

    def __init__(self, seed: int, faults: MemoryFaults, nics: tuple[int, int] = (1, 1)) -> None:
        self.clock = VirtualClock()
        self.network = MemoryNetwork(seed, self.clock, faults)
        self.initiator, self.target = (self.network.open(num_nics_by_group=(num_nics,)) for num_nics in nics)
        self.source_region = SharedRegion.create(name="source", num_bytes=PUSHED_BYTES + 8)
        self.target_region = SharedRegion.create(name="target", num_bytes=PUSHED_BYTES + 8)
        self.counter = SharedRegion.create(name="counter", num_bytes=REGION_BYTES)
        self.initiator.watch(self.counter)
        self.source_region.buffer[:PUSHED_BYTES] = bytes([FILL]) * PUSHED_BYTES
        self.target_region.buffer[:PUSHED_BYTES] = bytes([HOLE]) * PUSHED_BYTES
        self.exposure = self.target.expose(self.target.register(self.target_region))
        self.peer = self.initiator.connect(self.target.address)
        self.remote = self.initiator.attach(self.peer, self.exposure)
        self.source = self.initiator.register(self.source_region)

    def close(self) -> None:
        self.initiator.close()
        self.target.close()
        for region in (self.source_region, self.target_region, self.counter):
            region.close()

    def arm(self, push_id: int = 1, *, first_tick: int = 0) -> None:
        pages = np.arange(NUM_PAGES, dtype=np.uint32)
        push = PagePush(
            push_id=PushId(push_id),
            peer_id=self.peer,
            source=self.source,
            target=self.remote,
            immediate=Immediate(1),
            source_pages=pages,
            target_pages=pages,
            num_layers=1,
            run_bytes=PAGE_BYTES,
            source_page_bytes=PAGE_BYTES,
            target_page_bytes=PAGE_BYTES,
            source_layer_bytes=0,
            target_layer_bytes=0,
            first_tick=first_tick,
        )
        self.initiator.arm(push)

    def tick(self) -> None:
        ticks = int.from_bytes(self.counter.buffer[:8], "little") + 1
        self.counter.buffer[:8] = ticks.to_bytes(8, "little")

    def expect_all(self, *, deadline_ns: int = NS_PER_S) -> None:
        self.target.expect(Immediate(1), NUM_PAGES, deadline_ns=deadline_ns)

    def written(self) -> bytes:
        return self.target_region.buffer[:PUSHED_BYTES]

    def run(self, *, until_ns: int) -> Iterator[tuple[MemoryFabric, FabricEvent]]:
        """Every event, at the instant it happens."""
        while True:
            for fabric in (self.initiator, self.target):
                for event in fabric.poll():
                    yield fabric, event
            next_ns = self.network.next_ns()
            if next_ns is None or next_ns > until_ns:
                return
            self.clock.advance_ns(max(0, next_ns - self.clock.now_ns()))


@given(seed=st.integers(0, 2**32), faults=FAULTS, nics=NICS)
def test_push_ends_once_and_never_reads_its_source_afterwards(
    seed: int, faults: MemoryFaults, nics: tuple[int, int]
) -> None:
    pair = Pair(seed, faults, nics)
    pair.expect_all()
    pair.arm()
    pair.tick()
    ends: list[PushEnded] = []
    for _, event in pair.run(until_ns=2 * NS_PER_S):
        if isinstance(event, PushEnded):
            ends.append(event)
            pair.source_region.buffer[:PUSHED_BYTES] = bytes([REUSED]) * PUSHED_BYTES
        if isinstance(event, Landed):
            assert pair.written() == bytes([FILL]) * PUSHED_BYTES
    assert [end.push_id for end in ends] == [1]
    assert bytes([REUSED]) not in pair.written()
    stats = pair.initiator.stats()
    assert stats.num_in_flight == stats.num_armed_pushes == 0
    assert (ends[0].outcome is PushOutcome.FAILED) == (stats.num_writes_failed > 0)
    pair.close()


@given(seed=st.integers(0, 2**32), cancel_at_ns=st.integers(0, 2 * MAX_DELAY_NS), nics=NICS)
def test_cancelled_push_then_flush_leaves_nothing_under_way(
    seed: int, cancel_at_ns: int, nics: tuple[int, int]
) -> None:
    pair = Pair(seed, MemoryFaults(max_delay_ns=MAX_DELAY_NS, reorder=True), nics)
    pair.arm()
    pair.tick()
    pair.initiator.poll()
    pair.clock.advance_ns(cancel_at_ns)
    pair.initiator.cancel(PushId(1))
    pair.initiator.flush(FlushId(1), pair.peer, (pair.remote,), deadline_ns=NS_PER_S)
    before = None
    for _, event in pair.run(until_ns=NS_PER_S):
        if isinstance(event, FlushEnded):
            assert event.delivered
            before = pair.written()
    assert before == pair.written()
    pair.close()


@given(seed=st.integers(0, 2**32), fence_at_ns=st.integers(0, 2 * MAX_DELAY_NS), nics=NICS)
def test_nothing_lands_after_fenced(seed: int, fence_at_ns: int, nics: tuple[int, int]) -> None:
    pair = Pair(seed, MemoryFaults(max_delay_ns=MAX_DELAY_NS, reorder=True), nics)
    pair.arm()
    pair.tick()
    pair.initiator.poll()
    pair.clock.advance_ns(fence_at_ns)
    pair.target.fence(pair.exposure)
    before = None
    for _, event in pair.run(until_ns=NS_PER_S):
        if isinstance(event, Fenced):
            assert event.exposure == pair.exposure
            before = pair.written()
    assert before == pair.written()
    pair.close()


@pytest.mark.parametrize("nics", [(1, 1), (2, 2), (4, 2), (2, 4), (1, 4)])
def test_push_uses_the_nics_of_both_sides_alike(nics: tuple[int, int]) -> None:
    pair = Pair(1, MemoryFaults(), nics)
    pair.arm()
    pair.tick()
    assert [type(event) for event in pair.initiator.poll()] == [PushEnded]
    posting, receiving = nics
    assert pair.initiator.stats().bytes_posted_by_nic == (PUSHED_BYTES // posting,) * posting
    assert pair.target.inbox.num_received_by_nic == dict.fromkeys(range(receiving), NUM_PAGES // receiving)
    pair.close()


def test_same_seed_gives_the_same_events() -> None:
    def events(seed: int) -> list[FabricEvent]:
        pair = Pair(seed, MemoryFaults(max_delay_ns=MAX_DELAY_NS, reorder=True, write_failure_probability=0.01))
        pair.expect_all()
        pair.arm()
        pair.tick()
        happened = [event for _, event in pair.run(until_ns=2 * NS_PER_S)]
        pair.close()
        return happened

    assert events(3) == events(3)
    assert events(3) != events(4)


def test_landing_can_come_after_local_completion_and_before() -> None:
    order: set[str] = set()
    for seed in range(40):
        pair = Pair(seed, MemoryFaults(max_delay_ns=MAX_DELAY_NS, reorder=True))
        pair.expect_all()
        pair.arm()
        pair.tick()
        order.add(type(next(pair.run(until_ns=NS_PER_S))[1]).__name__)
        pair.close()
    assert order == {"PushEnded", "Landed"}


def test_killed_target_fails_the_push_and_later_ones_at_once() -> None:
    pair = Pair(1, MemoryFaults(max_delay_ns=MAX_DELAY_NS))
    pair.arm()
    pair.tick()
    pair.initiator.poll()
    pair.network.kill(pair.target)
    ended = [event for _, event in pair.run(until_ns=NS_PER_S)]
    assert [(type(event), getattr(event, "errno", 0)) for event in ended] == [(PushEnded, errno.ECONNRESET)]
    pair.arm(2)
    later = pair.initiator.poll()
    assert isinstance(later[0], PushEnded)
    assert later[0].outcome is PushOutcome.FAILED
    pair.close()


def test_killed_initiator_leaves_the_target_waiting_until_its_deadline() -> None:
    pair = Pair(1, MemoryFaults(min_delay_ns=1000, max_delay_ns=MAX_DELAY_NS))
    pair.expect_all(deadline_ns=NS_PER_S)
    pair.arm()
    pair.tick()
    pair.initiator.poll()
    pair.network.kill(pair.initiator)
    happened = list(pair.run(until_ns=2 * NS_PER_S))
    assert [(fabric, type(event)) for fabric, event in happened] == [(pair.target, ExpectationExpired)]
    pair.target.fence(pair.exposure)
    assert [type(event) for event in pair.target.poll()] == [Fenced]
    pair.close()


@pytest.mark.parametrize("first_tick", [0, 2])
def test_push_waits_for_its_tick(first_tick: int) -> None:
    pair = Pair(1, MemoryFaults())
    pair.arm(first_tick=first_tick)
    for _ in range(first_tick):
        pair.tick()
    assert pair.initiator.poll() == []
    pair.tick()
    assert [type(event) for event in pair.initiator.poll()] == [PushEnded]
    pair.close()
