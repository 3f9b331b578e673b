import ctypes
import mmap
import os
from pathlib import Path

import pytest

from pdserve.shared_region import SharedRegion


def test_shared_region_is_zeroed_and_rounded_up_to_whole_pages() -> None:
    region = SharedRegion.create(name="test", num_bytes=mmap.PAGESIZE + 1)
    try:
        assert region.num_bytes == 2 * mmap.PAGESIZE
        assert region.buffer[:] == bytes(region.num_bytes)
    finally:
        region.close()


def test_shared_region_mapped_twice_shows_the_same_bytes_and_outlives_its_maker() -> None:
    maker = SharedRegion.create(name="test", num_bytes=1)
    other = SharedRegion.from_fd(os.dup(maker.fd))
    try:
        maker.buffer[3:6] = b"abc"
        maker.close()
        assert other.buffer[3:6] == b"abc"
        assert other.num_bytes == mmap.PAGESIZE
    finally:
        other.close()


def test_shared_region_address_is_that_of_the_first_byte() -> None:
    region = SharedRegion.create(name="test", num_bytes=8)
    try:
        ctypes.memmove(region.address, b"xyz", 3)
        assert region.buffer[:4] == b"xyz\0"
    finally:
        region.close()


def test_shared_region_after_close_leaves_no_descriptor_and_no_file() -> None:
    region = SharedRegion.create(name="pdserve-test-region", num_bytes=8)
    region.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(region.fd)
    assert not [path for path in Path("/dev/shm").iterdir() if "pdserve-test-region" in path.name]
