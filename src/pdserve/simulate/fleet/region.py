"""Memory that has a size and no bytes."""

from dataclasses import dataclass

from pdserve.shared_region import RegionKind


@dataclass(frozen=True, slots=True, kw_only=True)
class SizedRegion:
    """A `MemoryRegion` that nobody reads or writes."""

    num_bytes: int

    @property
    def kind(self) -> RegionKind:
        return RegionKind.HOST

    @property
    def device_index(self) -> int | None:
        return None

    @property
    def fd(self) -> int:
        return -1

    @property
    def address(self) -> int:
        return 0

    def close(self) -> None:
        """Nothing to give back."""
