"""Device memory that two processes map: a cuMem allocation, passed on as a file descriptor. Torch-free.

Untested on hardware until tests/gpu has run.

Ownership, of the physical memory: [cuMemCreate or import, cuMemRelease) the handle, [cuMemMap, cuMemUnmap) the mapping,
[export, close) the descriptor; it is freed when the last of them, in all processes, is gone.
Source: CUDA Driver API reference, "Virtual Memory Management".
"""

import os
from contextlib import ExitStack
from typing import Any

from pdserve.engine.cuda_driver import CudaDriver
from pdserve.shared_region import RegionKind
from pdserve.units import div_ceil


class CudaRegion:
    """Implements `pdserve.shared_region.MemoryRegion`. Made by `create` and `from_fd`.

    Lifetime: until `close`; what the device was asked to do with the bytes must be done by then.
    """

    kind = RegionKind.CUDA

    def __init__(self, *, fd: int, num_bytes: int, address: int, device_index: int, undo: ExitStack) -> None:
        self.fd = fd
        self.num_bytes = num_bytes
        self.address = address
        """On the device; the host can't read it."""
        self.device_index = device_index
        self._undo = undo

    @classmethod
    def create(cls, *, num_bytes: int, device_index: int) -> "CudaRegion":
        """A new zeroed region of at least `num_bytes`, rounded up to the device's granularity.

        Raises: `ConfigError` when there is no such device or not so much memory.
        """
        with ExitStack() as undo:
            device = _Device(CudaDriver(), device_index, undo)
            rounded_bytes = device.rounded_up(num_bytes)
            with ExitStack() as handle_lifetime:
                handle = device.allocate(rounded_bytes, handle_lifetime)
                fd = device.export(handle)
                undo.callback(os.close, fd)
                address = device.map(handle, rounded_bytes, undo)
            device.clear(address, rounded_bytes)
            return cls(fd=fd, num_bytes=rounded_bytes, address=address, device_index=device_index, undo=undo.pop_all())

    @classmethod
    def from_fd(cls, fd: int, *, num_bytes: int, device_index: int) -> "CudaRegion":
        """Map a region that another process created with this size on this device; takes ownership of `fd`.

        The descriptor tells neither size nor device. Raises: as `create`.
        """
        with ExitStack() as undo:
            undo.callback(os.close, fd)
            device = _Device(CudaDriver(), device_index, undo)
            rounded_bytes = device.rounded_up(num_bytes)
            with ExitStack() as handle_lifetime:
                handle = device.take_in(fd, handle_lifetime)
                address = device.map(handle, rounded_bytes, undo)
            return cls(fd=fd, num_bytes=rounded_bytes, address=address, device_index=device_index, undo=undo.pop_all())

    def close(self) -> None:
        self._undo.close()


class _Device:
    """A device with its primary context, the one that torch and libfabric use too, held until `undo`."""

    def __init__(self, driver: CudaDriver, device_index: int, undo: ExitStack) -> None:
        self._driver = driver
        self._names = driver.names
        self._device = driver.call("cuDeviceGet", device_index)
        self._context = driver.call("cuDevicePrimaryCtxRetain", self._device)
        undo.callback(driver.call, "cuDevicePrimaryCtxRelease", self._device)
        self._handle_type = self._names.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        self._location = self._names.CUmemLocation()
        self._location.type = self._names.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._location.id = int(self._device)

    def rounded_up(self, num_bytes: int) -> int:
        minimum = self._names.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        granularity = self._driver.call("cuMemGetAllocationGranularity", self._properties(), minimum)
        return div_ceil(num_bytes, granularity) * granularity

    def allocate(self, num_bytes: int, undo: ExitStack) -> Any:
        handle = self._driver.call("cuMemCreate", num_bytes, self._properties(), 0)
        undo.callback(self._driver.call, "cuMemRelease", handle)
        return handle

    def export(self, handle: Any) -> int:
        return self._driver.call("cuMemExportToShareableHandle", handle, self._handle_type, 0)

    def take_in(self, fd: int, undo: ExitStack) -> Any:
        handle = self._driver.call("cuMemImportFromShareableHandle", fd, self._handle_type)
        undo.callback(self._driver.call, "cuMemRelease", handle)
        return handle

    def map(self, handle: Any, num_bytes: int, undo: ExitStack) -> int:
        """The address from which the device may read and write the memory, until `undo`."""
        address = int(self._driver.call("cuMemAddressReserve", num_bytes, 0, 0, 0))
        undo.callback(self._driver.call, "cuMemAddressFree", address, num_bytes)
        self._driver.call("cuMemMap", address, num_bytes, 0, handle, 0)
        undo.callback(self._driver.call, "cuMemUnmap", address, num_bytes)
        access = self._names.CUmemAccessDesc()
        access.location = self._location
        access.flags = self._names.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self._driver.call("cuMemSetAccess", address, num_bytes, [access], 1)
        return address

    def clear(self, address: int, num_bytes: int) -> None:
        self._driver.call("cuCtxPushCurrent", self._context)
        try:
            self._driver.call("cuMemsetD8", address, 0, num_bytes)
            self._driver.call("cuCtxSynchronize")
        finally:
            self._driver.call("cuCtxPopCurrent")

    def _properties(self) -> Any:
        """Of memory that can be shared by descriptor, and reached by NICs where the device can do that."""
        properties = self._names.CUmemAllocationProp()
        properties.type = self._names.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.requestedHandleTypes = self._handle_type
        properties.location = self._location
        attribute = self._names.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED
        properties.allocFlags.gpuDirectRDMACapable = self._driver.call("cuDeviceGetAttribute", attribute, self._device)
        return properties
