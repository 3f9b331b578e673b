"""What the prefill side writes from, and the pushes that move it."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from pdserve.fabric.port import PagePush, PushId, RegionId, SingleWrite
from pdserve.ids import Immediate, TailSlot
from pdserve.kv.shard import KvSharding
from pdserve.transfer.plan import RankPair
from pdserve.transfer.target import Target


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The regions of a prefill worker's ranks; a page has the same index in all of them."""

    sharding: KvSharding
    num_pages: int
    kv_regions: tuple[RegionId, ...]
    """By rank."""
    tail_region: RegionId
    tail_slot_bytes: int

    def page_pushes(
        self,
        target: Target,
        pairs: tuple[RankPair, ...],
        *,
        push_ids: Iterator[PushId],
        immediate: Immediate,
        source_pages: tuple[int, ...],
        target_pages: tuple[int, ...],
        first_tick: int,
    ) -> Iterator[PagePush]:
        """One push for each pair of ranks, over the same pages, which all of them share."""
        source_layout, target_layout = self.sharding.rank_layout, target.sharding.rank_layout
        source_array, target_array = np.array(source_pages, np.uint32), np.array(target_pages, np.uint32)
        for pair in pairs:
            yield PagePush(
                push_id=next(push_ids),
                peer_id=target.peer_id,
                source=self.kv_regions[pair.source_rank],
                target=target.kv[pair.target_rank],
                immediate=immediate,
                source_pages=source_array,
                target_pages=target_array,
                num_layers=source_layout.num_layers,
                run_bytes=pair.run_bytes,
                source_page_bytes=source_layout.page_bytes,
                target_page_bytes=target_layout.page_bytes,
                source_layer_bytes=source_layout.layer_bytes(self.num_pages),
                target_layer_bytes=target_layout.layer_bytes(target.num_pages),
                source_offset=pair.source_offset,
                target_offset=pair.target_offset,
                first_tick=first_tick,
            )

    def tail_write(
        self,
        target: Target,
        *,
        push_id: PushId,
        immediate: Immediate,
        source_slot: TailSlot,
        target_slot: TailSlot,
        tick: int,
    ) -> SingleWrite:
        return SingleWrite(
            push_id=push_id,
            peer_id=target.peer_id,
            source=self.tail_region,
            target=target.tail,
            immediate=immediate,
            source_offset=source_slot * self.tail_slot_bytes,
            target_offset=target_slot * self.tail_slot_bytes,
            num_bytes=self.tail_slot_bytes,
            tick=tick,
        )
