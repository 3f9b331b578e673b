"""Memory that two processes map and a fabric may register: the port, and host memory, an anonymous file (memfd).

The process that fills a region creates it and passes the file descriptor on; nothing is left in /dev/shm when the last
process ends, however it ends. Device memory, the other kind, is the engine's (`pdserve.engine.cuda_region`).
"""

import ctypes
import mmap
import os
from enum import Enum
from typing import Protocol

from pdserve.errors import InternalError
from pdserve.units import div_ceil


class RegionKind(Enum):
    HOST = "host"
    CUDA = "cuda"


class MemoryRegion(Protocol):
    """What whoever registers a region or passes it on needs to know of it."""

    @property
    def kind(self) -> RegionKind: ...

    @property
    def device_index(self) -> int | None:
        """Of the device whose memory it is, as CUDA numbers them in this process; None: the host's."""
        ...

    @property
    def fd(self) -> int: ...

    @property
    def num_bytes(self) -> int: ...

    @property
    def address(self) -> int:
        """Virtual address of the first byte in this process, or on the device."""
        ...

    def close(self) -> None: ...


class SharedRegion:
    """A mapped memfd.

    Lifetime: `close()` unmaps and closes the descriptor; views taken of `buffer` must be gone by then.
    Threads: creating and closing belong to one thread; the bytes are anybody's, under the rules of who uses them.
    """

    kind = RegionKind.HOST
    device_index = None

    def __init__(self, *, fd: int, num_bytes: int) -> None:
        self.fd = fd
        self.num_bytes = num_bytes
        self.buffer = mmap.mmap(fd, num_bytes)

    @classmethod
    def create(cls, *, name: str, num_bytes: int) -> "SharedRegion":
        """A new zeroed region of at least `num_bytes`, rounded up to whole operating system pages."""
        rounded_bytes = div_ceil(num_bytes, mmap.PAGESIZE) * mmap.PAGESIZE
        fd = os.memfd_create(name)
        os.ftruncate(fd, rounded_bytes)
        return cls(fd=fd, num_bytes=rounded_bytes)

    @classmethod
    def from_fd(cls, fd: int) -> "SharedRegion":
        """Map a region that another process made; takes ownership of `fd`."""
        return cls(fd=fd, num_bytes=os.fstat(fd).st_size)

    @property
    def address(self) -> int:
        """Virtual address of the first byte in this process."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self.buffer))

    def close(self) -> None:
        self.buffer.close()
        os.close(self.fd)


def host_buffer(region: MemoryRegion) -> mmap.mmap:
    """The region's bytes. Raises: `InternalError` when the host can't read them."""
    if not isinstance(region, SharedRegion):
        raise InternalError(f"the bytes of a {region.kind.value} region were asked for, which the host can't read")
    return region.buffer
