"""A push over two real interfaces: two network namespaces, joined by two veth pairs, with a process in each."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from pdserve.shared_region import SharedRegion

CHILD = Path(__file__).with_name("fabric_native_child.py")
REGION_BYTES = 64 * 65536 + 4096
NUM_PUSHES = 8
PUSHED_BYTES = 64 * 65536
NUM_LINKS = 2
COMMAND_TIMEOUT_S = 20
PUSH_TIMEOUT_S = 60


def run_ip(*arguments: str) -> str:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=True)
    return done.stdout


class Namespaces:
    """Namespace 0 has the addresses 198.18.L.1, namespace 1 198.18.L.2, for each link L."""

    def __init__(self) -> None:
        self.names = [f"pdserve-test-{os.getpid()}-{side}" for side in range(2)]

    def open(self) -> None:
        for name in self.names:
            run_ip("netns", "add", name)
        for link in range(NUM_LINKS):
            ends = [self.interface(side, link) for side in range(2)]
            run_ip(
                *("link", "add", ends[0], "netns", self.names[0], "type", "veth"),
                *("peer", "name", ends[1], "netns", self.names[1]),
            )
            for side, name in enumerate(self.names):
                run_ip("-n", name, "address", "add", f"{self.hosts(side)[link]}/24", "dev", ends[side])
                run_ip("-n", name, "link", "set", ends[side], "up")

    def close(self) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, timeout=COMMAND_TIMEOUT_S, check=False)

    def interface(self, side: int, link: int) -> str:
        return f"pd{side}link{link}"

    def hosts(self, side: int) -> tuple[str, ...]:
        return tuple(f"198.18.{link}.{side + 1}" for link in range(NUM_LINKS))

    def bytes_carried(self, side: int, link: int, counter: str) -> int:
        path = f"/sys/class/net/{self.interface(side, link)}/statistics/{counter}"
        return int(run_ip("netns", "exec", self.names[side], "cat", path))


@pytest.fixture
def namespaces() -> Iterator[Namespaces]:
    if shutil.which("ip") is None:
        pytest.skip("needs ip (iproute2)")
    opened = Namespaces()
    try:
        opened.open()
    except subprocess.CalledProcessError as error:
        opened.close()
        pytest.skip(f"network namespaces can't be made here: {error.stderr.strip()}")
    yield opened
    opened.close()


def start_child(namespace: str, region: SharedRegion, **task: Any) -> subprocess.Popen[str]:
    task = {"provider": "tcp", "region_fd": region.fd, **task}
    return subprocess.Popen(
        ["ip", "netns", "exec", namespace, sys.executable, str(CHILD), json.dumps(task)],
        pass_fds=[region.fd],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def test_push_over_two_links_lands_and_is_carried_by_both_alike(namespaces: Namespaces) -> None:
    with ExitStack() as cleanup:
        regions = [SharedRegion.create(name="pages", num_bytes=REGION_BYTES) for _ in range(2)]
        for region in regions:
            cleanup.callback(region.close)
        source, target = regions
        source.buffer[:] = np.random.default_rng(3).integers(0, 256, REGION_BYTES, np.uint8).tobytes()

        receiving = start_child(namespaces.names[1], target, bind_hosts=namespaces.hosts(1))
        cleanup.callback(kill, receiving)
        assert receiving.stdout is not None
        said = json.loads(receiving.stdout.readline())
        assert said["exposure"]["nics"] == [0, 1]
        before = [namespaces.bytes_carried(0, link, "tx_bytes") for link in range(NUM_LINKS)]
        sending = start_child(
            namespaces.names[0],
            source,
            bind_hosts=namespaces.hosts(0),
            target_address=said["address"],
            exposure=said["exposure"],
            num_pushes=NUM_PUSHES,
        )
        cleanup.callback(kill, sending)
        output, _ = sending.communicate(timeout=PUSH_TIMEOUT_S)
        assert target.buffer[:PUSHED_BYTES] == source.buffer[:PUSHED_BYTES]
        carried = [namespaces.bytes_carried(0, link, "tx_bytes") - before[link] for link in range(NUM_LINKS)]

    by_nic = msgspec.json.decode(output.splitlines()[-1], type=list[int])
    assert by_nic == [NUM_PUSHES * PUSHED_BYTES // NUM_LINKS] * NUM_LINKS
    for num_bytes in carried:
        assert 1.0 <= num_bytes / by_nic[0] < 1.1
