"""A fabric in memory that is now and then short of room for a push."""

from pdserve.errors import CapacityError
from pdserve.fabric.memory import MemoryFabric, MemoryNetwork
from pdserve.fabric.port import FabricEvent, PagePush, SingleWrite


class ShortFabric(MemoryFabric):
    num_armable: int | None = None
    """How many more pushes it takes before it refuses one; None: any number."""

    @classmethod
    def open(cls, network: MemoryNetwork, *, num_nics_by_group: tuple[int, ...]) -> "ShortFabric":
        fabric = cls(network, index=len(network.fabrics), num_nics_by_group=num_nics_by_group)
        network.fabrics.append(fabric)
        return fabric

    def arm(self, push: PagePush | SingleWrite) -> None:
        if self.num_armable == 0:
            self.num_armable = None
            raise CapacityError("too much is armed", retry_after_s=1.0)
        if self.num_armable is not None:
            self.num_armable -= 1
        super().arm(push)

    def poll(self) -> list[FabricEvent]:
        """Without pumping: the world does that, whenever something is due."""
        return self.inbox.take_events()
