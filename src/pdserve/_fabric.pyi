"""libfabric for pdserve.fabric.native, which is the only caller."""

from collections.abc import Sequence
import enum
from typing import Annotated

import numpy
from numpy.typing import NDArray


class PushOutcome(enum.Enum):
    DONE = 0

    CANCELLED = 1

    FAILED = 2

class LayerTimes:
    @property
    def computed_ns(self) -> int: ...

    @property
    def posted_ns(self) -> int: ...

    @property
    def completed_ns(self) -> int: ...

class PushEnded:
    @property
    def push_id(self) -> int: ...

    @property
    def outcome(self) -> PushOutcome: ...

    @property
    def error(self) -> int: ...

    @property
    def layers(self) -> list[LayerTimes]: ...

class FlushEnded:
    @property
    def flush_id(self) -> int: ...

    @property
    def delivered(self) -> bool: ...

    @property
    def error(self) -> int: ...

class Landed:
    @property
    def immediate(self) -> int: ...

    @property
    def num_writes(self) -> int: ...

    @property
    def first_ns(self) -> int: ...

    @property
    def last_ns(self) -> int: ...

    @property
    def arrivals_ns(self) -> list[int]: ...

class ExpectationExpired:
    @property
    def immediate(self) -> int: ...

    @property
    def num_arrived(self) -> int: ...

    @property
    def num_expected(self) -> int: ...

class Fenced:
    @property
    def num_bytes(self) -> int: ...

    @property
    def nics(self) -> list[int]: ...

    @property
    def slices(self) -> list[tuple[int, int, int, list[int]]]: ...

MAX_SLICE_BYTES: int = 4294967296

def libfabric_version() -> tuple[int, int]:
    """Of the library that was loaded: (major, minor)."""

class Engine:
    def __init__(self, provider: str, *, groups: Sequence[tuple[Sequence[str], Sequence[int]]], max_slice_bytes: int, device_memory: bool) -> None: ...

    @property
    def address(self) -> bytes: ...

    def fileno(self) -> int: ...

    def close(self) -> bool:
        """False when a worker thread hangs in the provider and was left behind."""

    def watch(self, address: int, num_bytes: int) -> None: ...

    def register(self, address: int, num_bytes: int, *, cuda_device: int | None, group_index: int) -> int: ...

    def expose(self, region_id: int) -> tuple[list[int], list[tuple[int, int, int, list[int]]]]:
        """
        The NICs, and the slices: (start, num_bytes, base, keys by NIC) of each.
        """

    def fence(self, num_bytes: int, nics: Sequence[int], slices: Sequence[tuple[int, int, int, Sequence[int]]]) -> None: ...

    def connect(self, address: bytes) -> int: ...

    def disconnect(self, peer_id: int) -> None: ...

    def attach(self, peer_id: int, num_bytes: int, nics: Sequence[int], slices: Sequence[tuple[int, int, int, Sequence[int]]]) -> int: ...

    def arm_pages(self, *, push_id: int, peer_id: int, source: int, target: int, immediate: int, source_pages: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu', writable=False)], target_pages: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu', writable=False)], num_layers: int, run_bytes: int, source_page_bytes: int, target_page_bytes: int, source_layer_bytes: int, target_layer_bytes: int, source_offset: int, target_offset: int, first_tick: int) -> None: ...

    def arm_single(self, *, push_id: int, peer_id: int, source: int, target: int, immediate: int, source_offset: int, target_offset: int, num_bytes: int, tick: int) -> None: ...

    def cancel(self, push_id: int) -> None: ...

    def flush(self, flush_id: int, peer_id: int, targets: Sequence[int], *, deadline_ns: int) -> None: ...

    def expect(self, immediate: int, num_writes: int, *, deadline_ns: int, record_arrivals: bool) -> None: ...

    def forget(self, immediate: int) -> None: ...

    def poll(self) -> list[PushEnded | FlushEnded | Landed | ExpectationExpired | Fenced]:
        """The events since the last call."""

    @property
    def bytes_posted_by_nic(self) -> list[int]: ...

    @property
    def num_writes_posted(self) -> int: ...

    @property
    def num_writes_completed(self) -> int: ...

    @property
    def num_writes_failed(self) -> int: ...

    @property
    def num_in_flight(self) -> int: ...

    @property
    def num_immediates_received(self) -> int: ...

    @property
    def num_stale_immediates(self) -> int: ...

    @property
    def num_armed_pushes(self) -> int: ...

class LayerCounter:
    """A rank's side of a layer counter, for tests and benchmarks."""

    @staticmethod
    def at(address: int) -> LayerCounter:
        """The counter in a mapped region, which must outlive it."""

    @property
    def ticks(self) -> int: ...

    def tick(self) -> None: ...
