"""What can be known of device memory without a device: the errors, and that the bindings have what we call."""

import os
import re
import sys
from ctypes.util import find_library
from pathlib import Path
from types import ModuleType

import pytest

from pdserve.engine import cuda_driver, cuda_region, cuda_writes
from pdserve.engine.cuda_driver import CudaDriver, require_devices
from pdserve.engine.cuda_region import CudaRegion
from pdserve.errors import ConfigError

needs_no_driver = pytest.mark.skipif(find_library("cuda") is not None, reason="needs a machine without NVIDIA driver")


@pytest.fixture
def bindings() -> ModuleType:
    module: ModuleType = pytest.importorskip("cuda.bindings.driver")
    return module


def used_names(pattern: str) -> set[str]:
    sources = "".join(Path(module.__file__ or "").read_text() for module in (cuda_driver, cuda_region, cuda_writes))
    names = set(re.findall(pattern, sources))
    assert names
    return names


def test_cuda_functions_that_are_called_are_in_the_bindings(bindings: ModuleType) -> None:
    assert [name for name in used_names(r'"(cu[A-Z]\w+)"') if not hasattr(bindings, name)] == []


def test_cuda_constants_that_are_named_are_in_the_bindings(bindings: ModuleType) -> None:
    named = [name.split(".") for name in used_names(r"names\.(CU\w+\.CU\w+)")]
    named += [["CUresult", name] for name in used_names(r'"(CUDA_ERROR_\w+)"')]
    assert [name for enum, name in named if not hasattr(getattr(bindings, enum), name)] == []


def test_cuda_structures_that_are_filled_have_their_fields(bindings: ModuleType) -> None:
    properties, access = bindings.CUmemAllocationProp(), bindings.CUmemAccessDesc()
    location = bindings.CUmemLocation()
    location.type, location.id = bindings.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE, 3
    properties.location = access.location = location
    properties.allocFlags.gpuDirectRDMACapable = 1
    assert (properties.location.id, access.location.id, properties.allocFlags.gpuDirectRDMACapable) == (3, 3, 1)


def test_cuda_driver_without_bindings_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    with pytest.raises(ConfigError, match=r"pip install 'pdserve\[cuda\]'"):
        CudaDriver()


@needs_no_driver
def test_cuda_devices_without_driver_are_refused(bindings: ModuleType) -> None:
    with pytest.raises(ConfigError, match="cuInit is missing; install an NVIDIA driver"):
        require_devices([0])


@needs_no_driver
def test_cuda_region_without_driver_is_refused_and_its_descriptor_closed(bindings: ModuleType) -> None:
    fd = os.memfd_create("pdserve-test-region")
    with pytest.raises(ConfigError, match="install an NVIDIA driver"):
        CudaRegion.from_fd(fd, num_bytes=1, device_index=0)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
