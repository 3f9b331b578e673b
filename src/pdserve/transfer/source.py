"""What the prefill side writes from, and the pushes that move it."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from pdserve.errors import InternalError
from pdserve.fabric.port import PagePush, PushId, RegionId, SingleWrite
from pdserve.ids import Immediate, TailSlot
from pdserve.kv.layout import KvLayout
from pdserve.kv.shard import KvSharding
from pdserve.transfer.plan import RankPair
from pdserve.transfer.target import Target


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSource:
    """The cache of a drafter: whole, on rank 0, with pages of the same indices."""

    layout: KvLayout
    region: RegionId


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The regions of a prefill worker's ranks; a page has the same index in all of them."""

    sharding: KvSharding
    num_pages: int
    kv_regions: tuple[RegionId, ...]
    """By rank."""
    draft: DraftSource | None = None
    tail_region: RegionId
    tail_slot_bytes: int

    @property
    def num_counted_layers(self) -> int:
        """Layers that tick in each pass: the model's, then the drafter's."""
        return self.sharding.layout.num_layers + (self.draft.layout.num_layers if self.draft is not None else 0)

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

    def draft_push(
        self,
        target: Target,
        *,
        push_id: PushId,
        immediate: Immediate,
        source_pages: tuple[int, ...],
        target_pages: tuple[int, ...],
        first_tick: int,
    ) -> PagePush:
        """Pages of the drafter's cache, whole from rank 0 to rank 0. Requires: both sides have one."""
        if self.draft is None or target.draft_kv is None:
            raise InternalError("a drafter's KV is pushed between workers that have no such drafter")
        layout = self.draft.layout
        return PagePush(
            push_id=push_id,
            peer_id=target.peer_id,
            source=self.draft.region,
            target=target.draft_kv,
            immediate=immediate,
            source_pages=np.array(source_pages, np.uint32),
            target_pages=np.array(target_pages, np.uint32),
            num_layers=layout.num_layers,
            run_bytes=layout.page_bytes,
            source_page_bytes=layout.page_bytes,
            target_page_bytes=layout.page_bytes,
            source_layer_bytes=layout.layer_bytes(self.num_pages),
            target_layer_bytes=layout.layer_bytes(target.num_pages),
            source_offset=0,
            target_offset=0,
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
