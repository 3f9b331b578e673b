"""What the native fabric does when a process at either end is killed or stopped.

Over shm processes are killed while they are idle only: one that dies in the middle of a write can take a lock of the
provider with it (`native/fabric/provider.h`).
"""

import json
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import msgspec
import numpy as np
import pytest

from pdserve.fabric.native import NativeFabric
from pdserve.fabric.port import (
    ExpectationExpired,
    FabricEvent,
    FabricPeerId,
    Fenced,
    FlushEnded,
    FlushId,
    Landed,
    PagePush,
    PushEnded,
    PushId,
    PushOutcome,
    RegionDescriptor,
    RemoteRegionId,
)
from pdserve.ids import Immediate
from pdserve.layer_counter import REGION_BYTES
from pdserve.shared_region import SharedRegion
from pdserve.units import NS_PER_MS, NS_PER_S

CHILD = Path(__file__).with_name("fabric_native_child.py")
PAGE_BYTES = 65536
NUM_PAGES = 64
REGION_SIZE_BYTES = NUM_PAGES * PAGE_BYTES + 4096
DEADLINE_S = 20.0

EventT = TypeVar("EventT", PushEnded, FlushEnded, Landed, ExpectationExpired, Fenced)


class Child:
    """A process that runs `fabric_native_child.py` on a region which this process sees too."""

    def __init__(self, provider: str, target_address: bytes = b"", exposure: RegionDescriptor | None = None) -> None:
        self.region = SharedRegion.create(name="child", num_bytes=REGION_SIZE_BYTES)
        task = {
            "provider": provider,
            "region_fd": self.region.fd,
            "target_address": target_address.hex(),
            "exposure": msgspec.to_builtins(exposure),
        }
        self.process = subprocess.Popen(
            [sys.executable, str(CHILD), json.dumps(task)],
            pass_fds=[self.region.fd],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.first_line = json.loads(self.process.stdout.readline())

    def __enter__(self) -> "Child":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.communicate()
        self.region.close()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


class Side:
    """This process's fabric: initiator or target."""

    def __init__(self, provider: str) -> None:
        self.fabric = NativeFabric(provider)
        self.region = SharedRegion.create(name="parent", num_bytes=REGION_SIZE_BYTES)
        self.region.buffer[:] = np.random.default_rng(3).integers(0, 256, REGION_SIZE_BYTES, np.uint8).tobytes()
        self.counter = SharedRegion.create(name="counter", num_bytes=REGION_BYTES)
        self.region_id = self.fabric.register(self.region)
        self.fabric.watch(self.counter)
        self.events: list[FabricEvent] = []

    def close(self) -> None:
        self.fabric.close()
        self.region.close()
        self.counter.close()

    def tick(self) -> None:
        from pdserve import _fabric

        _fabric.LayerCounter.at(self.counter.address).tick()

    def reach(self, child: Child) -> tuple[FabricPeerId, RemoteRegionId]:
        peer = self.fabric.connect(bytes.fromhex(child.first_line["address"]))
        descriptor = msgspec.convert(child.first_line["exposure"], RegionDescriptor)
        return peer, self.fabric.attach(peer, descriptor)

    def arm(self, push_id: int, peer: FabricPeerId, target: RemoteRegionId, *, num_rounds: int = 1) -> None:
        pages = np.tile(np.arange(NUM_PAGES, dtype=np.uint32), num_rounds)
        push = PagePush(
            push_id=PushId(push_id),
            peer_id=peer,
            source=self.region_id,
            target=target,
            immediate=Immediate(1),
            source_pages=pages,
            target_pages=pages,
            num_layers=1,
            run_bytes=PAGE_BYTES,
            source_page_bytes=PAGE_BYTES,
            target_page_bytes=PAGE_BYTES,
            source_layer_bytes=0,
            target_layer_bytes=0,
            first_tick=0,
        )
        self.fabric.arm(push)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline, f"events so far: {self.events}, {self.fabric.stats()}"
            select.select([self.fabric.fileno()], [], [], 0.005)
            self.events.extend(self.fabric.poll())

    def wait_for(self, kind: type[EventT]) -> EventT:
        found: list[EventT] = []

        def take() -> bool:
            found.extend(event for event in self.events if isinstance(event, kind))
            return bool(found)

        self.wait_until(take)
        self.events.remove(found[0])
        return found[0]


@pytest.mark.parametrize("provider", ["tcp", "shm"])
def test_push_to_another_process_lands_byte_exact(provider: str) -> None:
    side = Side(provider)
    with Child(provider) as child:
        peer, target = side.reach(child)
        side.arm(1, peer, target)
        side.tick()
        assert side.wait_for(PushEnded).outcome is PushOutcome.DONE
        side.fabric.flush(FlushId(1), peer, (target,), deadline_ns=time.monotonic_ns() + 10 * NS_PER_S)
        assert side.wait_for(FlushEnded).delivered
        written = NUM_PAGES * PAGE_BYTES
        assert child.region.buffer[:written] == side.region.buffer[:written]
    side.close()


def test_push_to_a_killed_target_over_tcp_fails_and_later_ones_fail_fast() -> None:
    side = Side("tcp")
    with Child("tcp") as child, Child("tcp") as other:
        peer, target = side.reach(child)
        side.tick()
        side.arm(1, peer, target, num_rounds=400)
        side.wait_until(lambda: side.fabric.stats().num_writes_completed > NUM_PAGES)
        child.kill()
        ended = side.wait_for(PushEnded)
        assert ended.outcome is PushOutcome.FAILED
        assert ended.errno != 0
        started = time.monotonic()
        side.arm(2, peer, target)
        assert side.wait_for(PushEnded).outcome is PushOutcome.FAILED
        side.fabric.flush(FlushId(1), peer, (target,), deadline_ns=time.monotonic_ns() + 10 * NS_PER_S)
        assert not side.wait_for(FlushEnded).delivered
        assert time.monotonic() - started < 1.0
        assert side.fabric.stats().num_in_flight == 0
        peer, target = side.reach(other)
        side.arm(3, peer, target)
        assert side.wait_for(PushEnded).outcome is PushOutcome.DONE
    side.close()


def test_push_to_a_target_that_died_before_fails_within_the_deadline() -> None:
    side = Side("tcp")
    with Child("tcp") as child:
        peer, target = side.reach(child)
        child.kill()
        side.tick()
        side.arm(1, peer, target)
        assert side.wait_for(PushEnded).outcome is PushOutcome.FAILED
    side.close()


def test_disconnect_of_a_target_killed_in_a_push_over_tcp_ends_that_push_and_no_others() -> None:
    side = Side("tcp")
    with Child("tcp") as child, Child("tcp") as other:
        peer, target = side.reach(child)
        other_peer, other_target = side.reach(other)
        side.tick()
        side.arm(1, peer, target, num_rounds=400)
        side.wait_until(lambda: side.fabric.stats().num_writes_completed > NUM_PAGES)
        child.kill()
        side.fabric.disconnect(peer)
        ended = side.wait_for(PushEnded)
        assert (ended.push_id, ended.outcome) in [(1, PushOutcome.FAILED), (1, PushOutcome.CANCELLED)]
        assert side.fabric.stats().num_in_flight == 0
        side.arm(2, other_peer, other_target)
        ended = side.wait_for(PushEnded)
        assert (ended.push_id, ended.outcome) == (2, PushOutcome.DONE)
    side.close()


def test_disconnect_of_a_target_killed_while_idle_over_shm_ends_that_push_and_no_others() -> None:
    side = Side("shm")
    with Child("shm") as child, Child("shm") as other:
        peer, target = side.reach(child)
        other_peer, other_target = side.reach(other)
        side.tick()
        side.arm(0, peer, target)
        assert side.wait_for(PushEnded).outcome is PushOutcome.DONE
        child.kill()
        side.arm(1, peer, target)
        side.wait_until(lambda: side.fabric.stats().num_in_flight > 0)
        side.arm(2, other_peer, other_target)
        ended = side.wait_for(PushEnded)
        assert (ended.push_id, ended.outcome) == (2, PushOutcome.DONE)
        side.fabric.disconnect(peer)
        ended = side.wait_for(PushEnded)
        assert (ended.push_id, ended.outcome) == (1, PushOutcome.FAILED)
        assert side.fabric.stats().num_in_flight == 0
    side.close()


def test_disconnect_of_a_stopped_target_over_tcp_ends_its_push_once_and_reads_the_source_no_more() -> None:
    side = Side("tcp")
    with Child("tcp") as child:
        peer, target = side.reach(child)
        side.tick()
        side.arm(1, peer, target, num_rounds=400)
        side.wait_until(lambda: side.fabric.stats().num_writes_completed > NUM_PAGES)
        child.process.send_signal(signal.SIGSTOP)
        side.fabric.cancel(PushId(1))
        side.fabric.disconnect(peer)
        side.wait_for(PushEnded)
        reused = bytes([0x55]) * 256
        side.region.buffer[:] = reused * (REGION_SIZE_BYTES // len(reused))
        child.process.send_signal(signal.SIGCONT)
        assert select.select([side.fabric.fileno()], [], [], 0.3)[0] == []
        assert reused not in child.region.buffer[:]
        assert side.fabric.stats().num_in_flight == 0
    side.close()


def test_target_over_tcp_outlives_an_initiator_killed_in_a_push() -> None:
    side = Side("tcp")
    exposure = side.fabric.expose(side.region_id)
    with Child("tcp", side.fabric.address, exposure) as child:
        side.wait_until(lambda: side.fabric.stats().num_immediates_received > NUM_PAGES)
        child.kill()
    side.fabric.expect(Immediate(2), 1, deadline_ns=time.monotonic_ns() + 100 * NS_PER_MS)
    assert side.wait_for(ExpectationExpired).num_arrived == 0
    side.fabric.fence(exposure)
    assert side.wait_for(Fenced).exposure == exposure
    num_received = side.fabric.stats().num_immediates_received
    with Child("tcp", side.fabric.address, side.fabric.expose(side.region_id)):
        side.wait_until(lambda: side.fabric.stats().num_immediates_received > num_received + NUM_PAGES)
    side.close()


def test_shm_files_of_a_killed_process_are_removed_at_open_and_our_own_at_close() -> None:
    def files_of(process_id: int) -> list[str]:
        return [path.name for path in Path("/dev/shm").iterdir() if path.name.startswith(f"{process_id}:")]

    with Child("shm") as child:
        assert files_of(child.process.pid)
        child.kill()
        assert files_of(child.process.pid)
        fabric = NativeFabric("shm")
        assert files_of(child.process.pid) == []
    fabric.close()
    with Child("shm") as child:
        child.process.communicate(input="")
        assert child.process.returncode == 0
        assert files_of(child.process.pid) == []
