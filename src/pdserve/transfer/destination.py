"""Where handoffs land on one data parallel rank: its pages, its tail slots, and the regions that hold them."""

from collections.abc import Iterable

from pdserve.errors import CapacityError, FabricError
from pdserve.fabric.port import Fabric, RegionDescriptor, RegionId
from pdserve.ids import PageIndex, TailSlot
from pdserve.kv.pages import PagePool
from pdserve.transfer.immediates import SlotPool
from pdserve.wire.peer import RankRegions


class Destination:
    """A page has the same index in the regions of all tensor parallel ranks."""

    def __init__(
        self, *, pool: PagePool, kv_regions: tuple[RegionId, ...], tail_region: RegionId, num_tail_slots: int
    ) -> None:
        """`kv_regions` by tensor parallel rank."""
        self.pool = pool
        self._kv_regions = kv_regions
        self._tail_region = tail_region
        self._tail_slots = SlotPool(num_slots=num_tail_slots, noun="tail slot")

    def expose(self, fabric: Fabric) -> RankRegions:
        """The regions under keys for one peer. Raises: `FabricError`; none is exposed then."""
        exposures: list[RegionDescriptor] = []
        try:
            for region in (*self._kv_regions, self._tail_region):
                exposures.append(fabric.expose(region))
        except FabricError:
            for exposure in exposures:
                fabric.fence(exposure)
            raise
        *kv, tail = exposures
        return RankRegions(kv=tuple(kv), tail=tail)

    def take(self, num_pages: int) -> tuple[list[PageIndex], TailSlot]:
        """Raises: `CapacityError` when either is short; nothing was taken then."""
        tail_slot = self._tail_slots.allocate()
        try:
            return self.pool.allocate(num_pages), TailSlot(tail_slot)
        except CapacityError:
            self._tail_slots.release(tail_slot)
            raise

    def release_tail_slot(self, tail_slot: TailSlot) -> None:
        self._tail_slots.release(tail_slot)


def exposures_of(regions: Iterable[RankRegions]) -> list[RegionDescriptor]:
    """Everything that a peer was given keys for."""
    return [exposure for rank in regions for exposure in (*rank.kv, rank.tail)]
