"""NVIDIA's library as pdserve asks it, with a stand-in for the library; no GPU has run this."""

import sys
from types import SimpleNamespace

import pytest

from pdserve.fabric.topology.nvml import ListedGpu, list_gpus


class NVMLError(Exception):
    pass


class Library:
    """A `pynvml` that lists two GPUs, of which one answers in bytes as old versions do."""

    NVMLError = NVMLError
    gpus = (("NVIDIA H100 80GB HBM3", "00000000:9D:00.0"), (b"NVIDIA H100 80GB HBM3", b"00000000:1B:00.0"))

    def nvmlInit(self) -> None: ...

    def nvmlShutdown(self) -> None: ...

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetName(self, handle: int) -> str | bytes:
        return self.gpus[handle][0]

    def nvmlDeviceGetPciInfo(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(busId=self.gpus[handle][1])


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    library = Library()
    monkeypatch.setitem(sys.modules, "pynvml", library)
    return library


def fail() -> None:
    raise NVMLError("Driver Not Loaded")


def test_gpus_are_listed_in_the_order_of_the_library(library: Library) -> None:
    assert list_gpus() == (
        ListedGpu(pci_address="0000:9d:00.0", name="NVIDIA H100 80GB HBM3"),
        ListedGpu(pci_address="0000:1b:00.0", name="NVIDIA H100 80GB HBM3"),
    )


@pytest.mark.parametrize("broken", ["nvmlInit", "nvmlDeviceGetCount"])
def test_library_that_fails_lists_no_gpus(library: Library, broken: str) -> None:
    setattr(library, broken, fail)
    assert list_gpus() == ()


def test_library_that_is_not_installed_lists_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert list_gpus() == ()
