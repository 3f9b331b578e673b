"""The CUDA driver, called through `cuda-bindings`, with typed errors. Torch-free; loaded where the first call is made.

Source: CUDA Driver API reference, "Data types used by CUDA driver" for the result codes.
"""

import importlib
from collections.abc import Sequence
from typing import Any

from pdserve.errors import ConfigError, InternalError, PdserveError

_ADVICE = {
    "CUDA_ERROR_INVALID_DEVICE": "there is no such device; nvidia-smi and CUDA_VISIBLE_DEVICES say which there are",
    "CUDA_ERROR_NO_DEVICE": "there is no NVIDIA GPU that this process may use; see nvidia-smi and CUDA_VISIBLE_DEVICES",
    "CUDA_ERROR_NOT_SUPPORTED": "this device or driver can't share memory between processes",
    "CUDA_ERROR_OUT_OF_MEMORY": "the device's memory is full; lower --kv-tokens, or end what else is on the device",
    "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH": "the driver's library and its kernel module are of different versions; reboot",
    "CUDA_ERROR_SYSTEM_NOT_READY": "the machine needs a running nvidia-fabricmanager",
}
"""What the operator can do about it; every other result is a bug of ours."""


class CudaDriver:
    """Threads: any; a context made current is so for the calling thread alone."""

    def __init__(self) -> None:
        """Raises: `ConfigError` when the bindings, the driver or a GPU are missing."""
        try:
            self.names: Any = importlib.import_module("cuda.bindings.driver")
        except ImportError as error:
            raise ConfigError(f"CUDA needs cuda-bindings: pip install 'pdserve[cuda]' ({error})") from error
        self.call("cuInit", 0)

    def call(self, function: str, *arguments: Any) -> Any:
        """What the driver's function gives beside its result, if anything.

        Raises: `ConfigError` when the operator can do something about it, else `InternalError`, with CUDA's own name.
        """
        try:
            result, *values = getattr(self.names, function)(*arguments)
        except RuntimeError as error:
            raise ConfigError(f"{function} is missing; install an NVIDIA driver, or a newer one: {error}") from error
        if result != self.names.CUresult.CUDA_SUCCESS:
            raise _error_of(function, result.name)
        return values[0] if values else None


def require_devices(device_indices: Sequence[int]) -> None:
    """Raises: `ConfigError` when a process can't use these devices."""
    driver = CudaDriver()
    num_devices = driver.call("cuDeviceGetCount")
    missing = [device_index for device_index in device_indices if not 0 <= device_index < num_devices]
    if missing:
        raise ConfigError(f"CUDA devices {missing} were asked for, but this process may use {num_devices}, from 0")


def _error_of(function: str, result_name: str) -> PdserveError:
    advice = _ADVICE.get(result_name)
    if advice is None:
        return InternalError(f"{function} failed with {result_name}")
    return ConfigError(f"{function} failed with {result_name}: {advice}")
