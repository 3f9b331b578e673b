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
        self,
        *,
        pool: PagePool,
        kv_regions: tuple[RegionId, ...],
        draft_kv_region: RegionId | None = None,
        tail_region: RegionId,
        num_tail_slots: int,
    ) -> None:
        """`kv_regions` by tensor parallel rank; `draft_kv_region` of rank 0, where there is a drafter with a cache."""
        self.pool = pool
        self._kv_regions = kv_regions
        self._draft_kv_region = draft_kv_region
        self._tail_region = tail_region
        self._tail_slots = SlotPool(num_slots=num_tail_slots, noun="tail slot")

    def expose(self, fabric: Fabric) -> RankRegions:
        """The regions under keys for one peer. Raises: `FabricError`; none is exposed then."""
        exposed: list[RegionDescriptor] = []

        def expose(region: RegionId) -> RegionDescriptor:
            exposed.append(fabric.expose(region))
            return exposed[-1]

        try:
            return RankRegions(
                kv=tuple(expose(region) for region in self._kv_regions),
                draft_kv=None if self._draft_kv_region is None else expose(self._draft_kv_region),
                tail=expose(self._tail_region),
            )
        except FabricError:
            for exposure in exposed:
                fabric.fence(exposure)
            raise

    def take(self, num_pages: int) -> tuple[list[PageIndex], TailSlot]:
        """Raises: `CapacityError` when either is short; nothing was taken then."""
        tail_slot = self._tail_slots.allocate()
        try:
            return self.pool.allocate(num_pages), TailSlot(tail_slot)
        except CapacityError:
            self._tail_slots.release(tail_slot)
            raise

    @property
    def used_tail_slots(self) -> frozenset[TailSlot]:
        return frozenset(map(TailSlot, self._tail_slots.used))

    def release_tail_slot(self, tail_slot: TailSlot) -> None:
        self._tail_slots.release(tail_slot)


def exposures_of(regions: Iterable[RankRegions]) -> list[RegionDescriptor]:
    """Everything that a peer was given keys for."""
    whole = [exposure for rank in regions for exposure in (*rank.kv, rank.draft_kv, rank.tail)]
    return [exposure for exposure in whole if exposure is not None]
