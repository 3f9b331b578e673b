"""The bytes of a region in device memory, copied by the driver. Torch-free, as the main process of a worker is."""

from collections.abc import Generator
from contextlib import contextmanager

from pdserve.engine.cuda_driver import CudaDriver
from pdserve.engine.cuda_region import CudaRegion


@contextmanager
def _context_of(device_index: int) -> Generator[CudaDriver]:
    driver = CudaDriver()
    device = driver.call("cuDeviceGet", device_index)
    driver.call("cuCtxPushCurrent", driver.call("cuDevicePrimaryCtxRetain", device))
    try:
        yield driver
    finally:
        driver.call("cuCtxPopCurrent")
        driver.call("cuDevicePrimaryCtxRelease", device)


def read_bytes(region: CudaRegion, *, start: int, num_bytes: int) -> bytes:
    copied = bytearray(num_bytes)
    with _context_of(region.device_index) as driver:
        driver.call("cuMemcpyDtoH", copied, region.address + start, num_bytes)
    return bytes(copied)


def write_bytes(region: CudaRegion, payload: bytes, *, start: int) -> None:
    with _context_of(region.device_index) as driver:
        driver.call("cuMemcpyHtoD", region.address + start, payload, len(payload))
