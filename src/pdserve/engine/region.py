"""Which memory a rank's region is made of: the host's, or that of the CUDA device it computes on. Torch-free."""

from pdserve.engine.cuda_region import CudaRegion
from pdserve.shared_region import SharedRegion

Region = SharedRegion | CudaRegion


def create_region(*, name: str, num_bytes: int, cuda_device: int | None) -> Region:
    """A new zeroed region of at least `num_bytes`; in host memory when there is no device.

    Raises: `ConfigError` when there is no such device or not so much memory.
    """
    if cuda_device is None:
        return SharedRegion.create(name=name, num_bytes=num_bytes)
    return CudaRegion.create(num_bytes=num_bytes, device_index=cuda_device)


def map_region(fd: int, *, num_bytes: int, cuda_device: int | None) -> Region:
    """The region that another process created with the same arguments; takes ownership of `fd`.

    Raises: `ConfigError`, as `create_region`.
    """
    if cuda_device is None:
        return SharedRegion.from_fd(fd)
    return CudaRegion.from_fd(fd, num_bytes=num_bytes, device_index=cuda_device)
