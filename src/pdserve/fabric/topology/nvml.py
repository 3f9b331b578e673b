"""What NVIDIA's management library says of GPUs, where it is installed; untested on hardware.

CUDA counts GPUs in NVML's order under `CUDA_DEVICE_ORDER=PCI_BUS_ID`; other orders are the operator's to map.
"""

import importlib
import logging
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedGpu:
    pci_address: str
    """As sysfs writes it: `0000:1b:00.0`."""
    name: str


def list_gpus() -> tuple[ListedGpu, ...]:
    """The GPUs in NVML's order; none where the `nvidia-ml-py` package or the driver is not installed."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return ()
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        logger.debug("nvml_unavailable reason=%s", error)
        return ()
    try:
        return tuple(_listed(nvml, index) for index in range(nvml.nvmlDeviceGetCount()))
    except nvml.NVMLError as error:
        logger.warning("nvml_failed reason=%s: GPUs are listed by PCI address", error)
        return ()
    finally:
        nvml.nvmlShutdown()


def sysfs_address(nvml_address: str) -> str:
    """NVML's `00000000:1B:00.0` as sysfs writes it: at least four digits of domain, lower case."""
    domain, _, rest = nvml_address.lower().partition(":")
    return f"{domain.lstrip('0'):0>4}:{rest}"


def _listed(nvml: Any, index: int) -> ListedGpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    address, name = nvml.nvmlDeviceGetPciInfo(handle).busId, nvml.nvmlDeviceGetName(handle)
    return ListedGpu(pci_address=sysfs_address(_as_text(address)), name=_as_text(name))


def _as_text(value: str | bytes) -> str:
    """Older versions of the package give bytes."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value
