"""Memory that two processes see and a fabric may register: an anonymous file (memfd), mapped.

The process that fills a region creates it and passes the file descriptor on; nothing is left in /dev/shm when the last
process ends, however it ends.
"""

import ctypes
import mmap
import os

from pdserve.units import div_ceil


class SharedRegion:
    """A mapped memfd.

    Lifetime: `close()` unmaps and closes the descriptor; views taken of `buffer` must be gone by then.
    Threads: creating and closing belong to one thread; the bytes are anybody's, under the rules of who uses them.
    """

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
