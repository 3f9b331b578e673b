"""What the ranks of a worker compute on."""

from enum import Enum


class Device(Enum):
    CPU = "cpu"
    CUDA = "cuda"
    """A device a rank, with its KV in device memory. Untested on hardware."""
