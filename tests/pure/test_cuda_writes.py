"""What NICs wrote is flushed where the device needs it, with a scripted CUDA driver under the real names."""

import sys
from types import ModuleType
from typing import Any

import pytest

from pdserve.engine.cuda_writes import NicWrites
from pdserve.errors import ConfigError

NONE, OWNER = 0, 100
HOST, MEMOPS = 1, 2
CONTEXT = "context of device 3"


class ScriptedDriver(ModuleType):
    """Device 3 with attributes as told; notes what is done in its context. Enumerations are the real ones."""

    def __init__(self, bindings: ModuleType, *, supported: bool, ordering: int, options: int) -> None:
        super().__init__("scripted")
        self._bindings = bindings
        prefix = "CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_"
        self._attributes = {
            f"{prefix}SUPPORTED": int(supported),
            f"{prefix}WRITES_ORDERING": ordering,
            f"{prefix}FLUSH_WRITES_OPTIONS": options,
        }
        self.current: list[str] = []
        self.num_retained = 0
        self.flushed: list[tuple[str, str, str]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bindings, name)

    def cuInit(self, flags: int) -> tuple[Any]:
        return (self._bindings.CUresult.CUDA_SUCCESS,)

    def cuDeviceGet(self, device_index: int) -> tuple[Any, int]:
        return self._bindings.CUresult.CUDA_SUCCESS, device_index

    def cuDeviceGetAttribute(self, attribute: Any, device: int) -> tuple[Any, int]:
        return self._bindings.CUresult.CUDA_SUCCESS, self._attributes[attribute.name]

    def cuDevicePrimaryCtxRetain(self, device: int) -> tuple[Any, str]:
        self.num_retained += 1
        return self._bindings.CUresult.CUDA_SUCCESS, f"context of device {device}"

    def cuDevicePrimaryCtxRelease(self, device: int) -> tuple[Any]:
        self.num_retained -= 1
        return (self._bindings.CUresult.CUDA_SUCCESS,)

    def cuCtxPushCurrent(self, context: str) -> tuple[Any]:
        self.current.append(context)
        return (self._bindings.CUresult.CUDA_SUCCESS,)

    def cuCtxPopCurrent(self) -> tuple[Any, str]:
        return self._bindings.CUresult.CUDA_SUCCESS, self.current.pop()

    def cuFlushGPUDirectRDMAWrites(self, target: Any, scope: Any) -> tuple[Any]:
        self.flushed.append((self.current[-1], target.name, scope.name))
        return (self._bindings.CUresult.CUDA_SUCCESS,)


def scripted(
    monkeypatch: pytest.MonkeyPatch, *, ordering: int, options: int = HOST, supported: bool = True
) -> ScriptedDriver:
    bindings = pytest.importorskip("cuda.bindings.driver")
    driver = ScriptedDriver(bindings, supported=supported, ordering=ordering, options=options)
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", driver)
    return driver


def test_nic_writes_on_a_device_without_ordering_are_flushed_in_its_context(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = scripted(monkeypatch, ordering=NONE)
    writes = NicWrites([3])
    writes.make_visible()
    writes.make_visible()
    flush = (
        CONTEXT,
        "CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX",
        "CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_ALL_DEVICES",
    )
    assert driver.flushed == [flush, flush]
    assert (driver.current, driver.num_retained) == ([], 1)
    writes.close()
    assert driver.num_retained == 0


@pytest.mark.parametrize(("ordering", "supported"), [(OWNER, True), (NONE, False)])
def test_nic_writes_on_a_device_that_orders_or_takes_none_are_not_flushed(
    monkeypatch: pytest.MonkeyPatch, ordering: int, supported: bool
) -> None:
    driver = scripted(monkeypatch, ordering=ordering, supported=supported)
    NicWrites([3]).make_visible()
    assert driver.flushed == []


def test_nic_writes_on_a_device_that_can_not_be_flushed_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = scripted(monkeypatch, ordering=NONE, options=MEMOPS)
    with pytest.raises(ConfigError, match="CUDA device 3 neither orders"):
        NicWrites([3])
    assert driver.num_retained == 0


def test_nic_writes_without_devices_need_no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    writes = NicWrites(())
    writes.make_visible()
    writes.close()
