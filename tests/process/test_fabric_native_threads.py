"""What the native fabric does to the process it lives in: its threads, its signal handlers, its registrations."""

import contextlib
import os
import select
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from pdserve.errors import FabricError
from pdserve.fabric.native import NativeFabric
from pdserve.fabric.port import DomainGroup, FabricPeerId, Landed, PushEnded, PushId, RegionDescriptor, SingleWrite
from pdserve.ids import Immediate
from pdserve.layer_counter import REGION_BYTES
from pdserve.shared_region import SharedRegion
from pdserve.units import NS_PER_S

CPUS_OF_A_MASK = 1024
"""The cores that a glibc affinity mask names."""

CLOCK_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def fabric_thread_seconds() -> float:
    """CPU time of the fabric's own threads so far."""
    total_ticks = 0
    for task in Path("/proc/self/task").iterdir():
        if (task / "comm").read_text().startswith("fabric-"):
            fields = (task / "stat").read_text().rpartition(")")[2].split()
            total_ticks += int(fields[11]) + int(fields[12])
    return total_ticks / CLOCK_TICKS_PER_S


def fabric_threads() -> list[str]:
    """The fabric's own threads that the kernel still lists."""
    names: list[str] = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # It has ended since it was listed.
            names.append((task / "comm").read_text().strip())
    return [name for name in names if name.startswith("fabric-")]


def copy_half(
    initiator: NativeFabric, target: NativeFabric, region: SharedRegion, *, group_index: int = 0
) -> tuple[FabricPeerId, RegionDescriptor]:
    """The initiator wrote the first 4096 bytes over the next. Returns the target and what it exposed."""
    region.buffer[:4096] = bytes([7]) * 4096
    exposure = target.expose(target.register(region, group_index=group_index))
    peer = initiator.connect(target.address)
    target.expect(Immediate(1), 1, deadline_ns=time.monotonic_ns() + 20 * NS_PER_S)
    write = SingleWrite(
        push_id=PushId(1),
        peer_id=peer,
        source=initiator.register(region, group_index=group_index),
        target=initiator.attach(peer, exposure),
        immediate=Immediate(1),
        source_offset=0,
        target_offset=4096,
        num_bytes=4096,
    )
    initiator.arm(write)
    assert select.select([target.fileno()], [], [], 20.0)[0]
    assert region.buffer[4096:] == region.buffer[:4096]
    assert select.select([initiator.fileno()], [], [], 20.0)[0]
    assert [event.push_id for event in initiator.poll() if isinstance(event, PushEnded)] == [1]
    return peer, exposure


@pytest.mark.parametrize("provider", ["tcp", "shm"])
def test_idle_threads_use_less_than_a_twentieth_of_a_core(provider: str) -> None:
    fabric = NativeFabric(provider)
    counter = SharedRegion.create(name="counter", num_bytes=REGION_BYTES)
    fabric.watch(counter)
    fabric.expect(Immediate(1), 1, deadline_ns=time.monotonic_ns() + 60 * NS_PER_S)
    before_s, started_s = fabric_thread_seconds(), time.monotonic()
    assert select.select([fabric.fileno()], [], [], 2.0)[0] == []
    used_s, elapsed_s = fabric_thread_seconds() - before_s, time.monotonic() - started_s
    fabric.close()
    counter.close()
    assert used_s / elapsed_s < 0.05


@pytest.mark.parametrize("provider", ["tcp", "shm"])
def test_close_ends_the_threads_and_refuses_further_calls(provider: str) -> None:
    fabric = NativeFabric(provider)
    fabric.close()
    fabric.close()
    # A joined thread is listed for a moment more: joining waits for its memory, /proc for its task.
    deadline = time.monotonic() + 10.0
    while (left := fabric_threads()) and time.monotonic() < deadline:
        os.sched_yield()
    assert left == []
    with pytest.raises(FabricError, match="closed"):
        fabric.connect(fabric.address)


def open_descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


@pytest.mark.parametrize("provider", ["tcp", "shm"])
def test_peers_that_are_disconnected_leave_no_descriptor_open(provider: str) -> None:
    region = SharedRegion.create(name="halves", num_bytes=8192)
    initiator = NativeFabric(provider)
    num_before = open_descriptors()
    targets = [NativeFabric(provider) for _ in range(3)]
    peers = [copy_half(initiator, target, region)[0] for target in targets]
    while targets:  # The oldest goes first, while younger ones are open.
        initiator.disconnect(peers.pop(0))
        targets.pop(0).close()
    deadline = time.monotonic() + 10.0
    while (num_after := open_descriptors()) > num_before and time.monotonic() < deadline:
        select.select([initiator.fileno()], [], [], 0.01)
        initiator.poll()
    assert num_after <= num_before
    initiator.close()
    region.close()


@pytest.mark.skipif(threading.current_thread() is not threading.main_thread(), reason="signals need the main thread")
def test_open_over_shm_leaves_signal_handlers_alone() -> None:
    received: list[int] = []
    previous = signal.signal(signal.SIGTERM, lambda signum, _: received.append(signum))
    try:
        fabric, peer = NativeFabric("shm"), NativeFabric("shm")
        region = SharedRegion.create(name="halves", num_bytes=8192)
        copy_half(fabric, peer, region)
        os.kill(os.getpid(), signal.SIGTERM)
        assert received == [signal.SIGTERM]
        for opened in (fabric, peer, region):
            opened.close()
    finally:
        signal.signal(signal.SIGTERM, previous)


def test_open_of_an_unknown_provider_names_the_known_ones() -> None:
    with pytest.raises(FabricError, match="tcp, shm, efa, verbs"):
        NativeFabric("carrier-pigeon")


@pytest.mark.parametrize("provider", ["tcp", "shm"])
def test_open_for_device_memory_of_a_provider_without_a_nic_says_what_to_use(provider: str) -> None:
    with pytest.raises(FabricError, match=f"{provider} can't write from or to GPU memory here; use verbs or efa"):
        NativeFabric(provider, device_memory=True)


def test_open_of_a_provider_that_is_not_here_says_what_to_install() -> None:
    with pytest.raises(FabricError, match="EFA driver") as refused:
        NativeFabric("efa")
    assert refused.value.operation == "fi_getinfo"
    assert refused.value.errno != 0


def fabric_thread_cpus() -> list[tuple[str, str]]:
    """Name and allowed cores of each of the fabric's threads."""
    threads: list[tuple[str, str]] = []
    for task in Path("/proc/self/task").iterdir():
        fields = dict(line.split(":\t") for line in (task / "status").read_text().splitlines() if ":\t" in line)
        if fields["Name"].startswith("fabric-"):
            threads.append((fields["Name"], fields["Cpus_allowed_list"]))
    return sorted(threads)


def test_threads_of_a_group_run_on_its_cores_alone() -> None:
    cpus = sorted(os.sched_getaffinity(0))
    first, last = cpus[0], cpus[-1]
    groups = [
        DomainGroup(bind_hosts=("127.0.0.1",), cpus=(first,)),
        DomainGroup(bind_hosts=("127.0.0.2", "127.0.0.3"), cpus=(last,)),
    ]
    fabric = NativeFabric("tcp", groups)
    counter = SharedRegion.create(name="counter", num_bytes=REGION_BYTES)
    fabric.watch(counter)
    expected = [("fabric-watcher", str(cpu)) for cpu in (first, last)]
    expected += [("fabric-worker", str(cpu)) for cpu in (first, last)]
    assert fabric_thread_cpus() == sorted(expected)
    assert sorted(os.sched_getaffinity(0)) == cpus
    fabric.close()
    counter.close()
    assert fabric_thread_cpus() == []


@pytest.mark.parametrize("cpu", [CPUS_OF_A_MASK - 1, CPUS_OF_A_MASK, 1 << 31])
def test_open_on_cores_that_are_not_there_fails(cpu: int) -> None:
    with pytest.raises(FabricError, match="core"):
        NativeFabric("tcp", [DomainGroup(bind_hosts=("127.0.0.1",), cpus=(cpu,))])


@pytest.mark.parametrize(
    ("provider", "groups", "reason"),
    [
        ("shm", [DomainGroup(bind_hosts=("", ""))], "one NIC a domain group"),
        ("tcp", [DomainGroup(bind_hosts=())], "at least one NIC"),
        ("tcp", [], "1 to 64 NICs"),
        ("tcp", [DomainGroup(bind_hosts=("127.0.0.1",))] * 65, "1 to 64 NICs"),
    ],
)
def test_open_with_groups_that_can_not_be_is_refused(provider: str, groups: list[DomainGroup], reason: str) -> None:
    with pytest.raises(FabricError, match=reason):
        NativeFabric(provider, groups)


def test_open_whose_second_nic_is_not_ours_leaves_no_thread() -> None:
    with pytest.raises(FabricError, match="bind host"):
        NativeFabric("tcp", [DomainGroup(bind_hosts=("127.0.0.1",)), DomainGroup(bind_hosts=("192.0.2.77",))])
    assert fabric_thread_cpus() == []


def test_groups_over_shm_have_a_domain_each() -> None:
    groups = [DomainGroup(bind_hosts=("",))] * 2
    initiator, target = NativeFabric("shm", groups), NativeFabric("shm", groups)
    region = SharedRegion.create(name="halves", num_bytes=8192)
    _, exposure = copy_half(initiator, target, region, group_index=1)
    assert exposure.nics == (1,)
    assert initiator.stats().bytes_posted_by_nic == (0, 4096)
    for opened in (initiator, target, region):
        opened.close()


def test_open_on_a_host_that_is_not_ours_fails() -> None:
    with pytest.raises(FabricError, match="bind host"):
        NativeFabric("tcp", [DomainGroup(bind_hosts=("192.0.2.77",))])


@pytest.mark.parametrize(
    ("provider", "hosts"), [("tcp", ("127.0.0.1",)), ("tcp", ("127.0.0.1", "127.0.0.2")), ("shm", ("",))]
)
def test_write_across_registrations_lands_whole_and_counts_once(provider: str, hosts: tuple[str, ...]) -> None:
    page_bytes, num_pages = 16384, 20
    groups = [DomainGroup(bind_hosts=hosts)]
    initiator = NativeFabric(provider, groups, max_slice_bytes=3 * page_bytes + 4096)
    target = NativeFabric(provider, groups, max_slice_bytes=2 * page_bytes + 8192)
    source_region = SharedRegion.create(name="source", num_bytes=page_bytes * num_pages)
    target_region = SharedRegion.create(name="target", num_bytes=page_bytes * num_pages)
    source_region.buffer[:] = np.random.default_rng(5).integers(0, 256, page_bytes * num_pages, np.uint8).tobytes()
    source = initiator.register(source_region)
    exposure = target.expose(target.register(target_region))
    assert len(exposure.slices) > 5
    peer = initiator.connect(target.address)
    remote = initiator.attach(peer, exposure)
    target.expect(Immediate(1), num_pages, deadline_ns=time.monotonic_ns() + 20 * NS_PER_S)
    for page in range(num_pages):
        write = SingleWrite(
            push_id=PushId(page),
            peer_id=peer,
            source=source,
            target=remote,
            immediate=Immediate(1),
            source_offset=page * page_bytes,
            target_offset=page * page_bytes,
            num_bytes=page_bytes,
        )
        initiator.arm(write)
    assert select.select([target.fileno()], [], [], 20.0)[0]
    assert [type(event) for event in target.poll()] == [Landed]
    assert target_region.buffer[:] == source_region.buffer[:]
    assert target.stats().num_immediates_received == num_pages
    for opened in (initiator, target, source_region, target_region):
        opened.close()
