"""Rule H1 on CUDA devices: what NICs wrote, and the fabric has counted, is there for kernels launched after it.

A NIC's completion on the host does not say so for every device. Those that do not order what NICs write have to be
flushed, and in the process that the NICs' mappings belong to: the worker's, which registers the regions, not the ranks.
Torch-free. Untested on hardware.
Source: CUDA Driver API reference, cuFlushGPUDirectRDMAWrites and CUGPUDirectRDMAWritesOrdering.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from pdserve.engine.cuda_driver import CudaDriver
from pdserve.errors import ConfigError


class NicWrites:
    """What NICs write through mappings of this process into the memory of some devices. Lifetime: until `close`."""

    def __init__(self, device_indices: Sequence[int]) -> None:
        """Raises: `ConfigError` when a device, which there must be then, needs to be flushed and can't be."""
        self._flushed: list[_FlushedDevice] = []
        with ExitStack() as undo:
            for device_index in device_indices:
                device = _FlushedDevice(CudaDriver(), device_index, undo)
                if device.must_be_flushed():
                    self._flushed.append(device)
            self._undo = undo.pop_all()

    def make_visible(self) -> None:
        """Whatever has been counted is seen by kernels that are launched from now on, by any process.

        Cost: waits some microseconds for each device that has to be flushed; the later ones order writes themselves.
        """
        for device in self._flushed:
            device.flush()

    def close(self) -> None:
        self._flushed.clear()
        self._undo.close()


class _FlushedDevice:
    """A device with its primary context, in which libfabric registers too, held until `undo`."""

    def __init__(self, driver: CudaDriver, device_index: int, undo: ExitStack) -> None:
        self._driver = driver
        self._names = driver.names
        self._device_index = device_index
        self._device = driver.call("cuDeviceGet", device_index)
        self._context = driver.call("cuDevicePrimaryCtxRetain", self._device)
        undo.callback(driver.call, "cuDevicePrimaryCtxRelease", self._device)

    def must_be_flushed(self) -> bool:
        """Raises: `ConfigError` when it must be and can't be."""
        names = self._names
        if not self._attribute(names.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED):
            return False
        ordering = self._attribute(names.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING)
        # Of what other devices see there is no need: a rank computes on the device that its region lies on.
        if ordering >= int(names.CUGPUDirectRDMAWritesOrdering.CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER):
            return False
        options = self._attribute(names.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS)
        if options & int(names.CUflushGPUDirectRDMAWritesOptions.CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST):
            return True
        raise ConfigError(
            f"CUDA device {self._device_index} neither orders what NICs write to it nor lets this process wait for it: "
            "leave --device cuda out"
        )

    def flush(self) -> None:
        """All contexts, not the owning one alone: the kernels are launched in that of another process."""
        target = self._names.CUflushGPUDirectRDMAWritesTarget.CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX
        scope = self._names.CUflushGPUDirectRDMAWritesScope.CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_ALL_DEVICES
        self._driver.call("cuCtxPushCurrent", self._context)
        try:
            self._driver.call("cuFlushGPUDirectRDMAWrites", target, scope)
        finally:
            self._driver.call("cuCtxPopCurrent")

    def _attribute(self, attribute: Any) -> int:
        return int(self._driver.call("cuDeviceGetAttribute", attribute, self._device))
