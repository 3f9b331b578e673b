"""Figures of processes as they are read from `/proc`: of a folder that looks like it, and of this very process."""

import os
from pathlib import Path

import pytest

from pdserve.bench.soak.process_figures import ProcessFigures, read_figures
from pdserve.shared_region import SharedRegion

MAPS = """\
7f0000000000-7f0000004000 rw-s 00000000 00:01 77 /memfd:kv (deleted)
7f0000004000-7f0000006000 rw-s 00004000 00:01 77 /memfd:kv (deleted)
7f0000010000-7f0000014000 rw-s 00000000 00:01 77 /memfd:kv (deleted)
7f0000020000-7f0000021000 rw-s 00000000 00:02 78 /dev/shm/1:0:ep
7f0000030000-7f0000031000 r-xp 00000000 08:01 79 /usr/lib/libc.so.6
7ffc00000000-7ffc00001000 rw-p 00000000 00:00 0
"""


def write_process(proc: Path, pid: int, *, lines: str = "VmRSS:\t2048 kB\nRssShmem:\t512 kB\nThreads:\t3\n") -> None:
    folder = proc / str(pid)
    (folder / "fd").mkdir(parents=True)
    for number in range(5):
        (folder / "fd" / str(number)).touch()
    (folder / "status").write_text(f"Name:\tx\n{lines}")
    (folder / "maps").write_text(MAPS)


def test_figures_of_a_process_count_each_shared_part_once(tmp_path: Path) -> None:
    write_process(tmp_path, 5)
    assert read_figures(5, proc=tmp_path) == ProcessFigures(
        rss_bytes=2 << 20, shared_rss_bytes=1 << 19, num_fds=5, num_threads=3, shared_bytes=0x4000 + 0x2000 + 0x1000
    )


def test_figures_of_a_process_that_is_gone_or_a_zombie_are_none(tmp_path: Path) -> None:
    write_process(tmp_path, 5, lines="Threads:\t1\n")
    assert read_figures(5, proc=tmp_path) is None
    assert read_figures(6, proc=tmp_path) is None


def test_shared_region_and_descriptor_of_this_process_are_seen() -> None:
    before = read_figures(os.getpid())
    region = SharedRegion.create(name="soak-test", num_bytes=1 << 20)
    during = read_figures(os.getpid())
    region.close()
    after = read_figures(os.getpid())
    if before is None or during is None or after is None:
        pytest.fail("this process has no figures")
    assert during.shared_bytes - before.shared_bytes == 1 << 20
    assert during.num_fds - before.num_fds >= 1
    assert after.shared_bytes == before.shared_bytes
