"""A process with one native fabric, for the tests with several processes. Run by path, told by JSON.

As a target it exposes the region it was given, says how to reach it, and counts until its standard input closes. As an
initiator it writes pages to a target, for ever or a number of times; then it flushes, and says how many bytes it had
written over each NIC.
"""

import json
import os
import select
import sys
import time

import msgspec
import numpy as np

from pdserve.fabric.native import NativeFabric
from pdserve.fabric.port import DomainGroup, FlushEnded, FlushId, PagePush, PushId, RegionDescriptor
from pdserve.ids import Immediate
from pdserve.layer_counter import REGION_BYTES
from pdserve.shared_region import SharedRegion
from pdserve.units import NS_PER_S

PAGE_BYTES = 65536
NUM_PAGES = 64


class Task(msgspec.Struct):
    provider: str
    region_fd: int
    target_address: str = ""
    """Hex; empty for a target."""
    exposure: RegionDescriptor | None = None
    num_pushes: int = 1 << 30
    """Of all pages."""
    bind_hosts: tuple[str, ...] = ("127.0.0.1",)


def say(message: object) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def be_target(fabric: NativeFabric, region: SharedRegion) -> None:
    exposure = fabric.expose(fabric.register(region))
    say({"address": fabric.address.hex(), "exposure": msgspec.to_builtins(exposure)})
    while True:
        readable, _, _ = select.select([sys.stdin, fabric.fileno()], [], [])
        for event in fabric.poll():
            say({"event": type(event).__name__})
        if sys.stdin in readable and not os.read(sys.stdin.fileno(), 1):
            break


def be_initiator(fabric: NativeFabric, region: SharedRegion, task: Task) -> None:
    assert task.exposure is not None
    source = fabric.register(region)
    counter = SharedRegion.create(name="counter", num_bytes=REGION_BYTES)
    fabric.watch(counter)
    peer = fabric.connect(bytes.fromhex(task.target_address))
    target = fabric.attach(peer, task.exposure)
    pages = np.arange(NUM_PAGES, dtype=np.uint32)
    from pdserve import _fabric

    _fabric.LayerCounter.at(counter.address).tick()
    say("writing")
    for push_id in range(task.num_pushes):
        push = PagePush(
            push_id=PushId(push_id),
            peer_id=peer,
            source=source,
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
        fabric.arm(push)
        while not fabric.poll():
            select.select([fabric.fileno()], [], [])
    bytes_posted_by_nic = fabric.stats().bytes_posted_by_nic
    fabric.flush(FlushId(1), peer, (target,), deadline_ns=time.monotonic_ns() + 10 * NS_PER_S)
    while not (events := fabric.poll()):
        select.select([fabric.fileno()], [], [])
    assert events == [FlushEnded(flush_id=FlushId(1), delivered=True, errno=0)]
    say(bytes_posted_by_nic)


def main() -> None:
    task = msgspec.json.decode(sys.argv[1], type=Task)
    region = SharedRegion.from_fd(task.region_fd)
    fabric = NativeFabric(task.provider, [DomainGroup(bind_hosts=task.bind_hosts)])
    if task.exposure is None:
        be_target(fabric, region)
    else:
        be_initiator(fabric, region, task)
    fabric.close()


if __name__ == "__main__":
    main()
