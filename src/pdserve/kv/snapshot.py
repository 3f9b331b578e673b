"""Copies of a sequence's KV out of the regions of its ranks: for verification, never on a request's way."""

from collections.abc import Sequence
from mmap import mmap

import msgspec
import numpy as np
from numpy.typing import NDArray

from pdserve.kv.layout import KvLayout
from pdserve.kv.shard import KvSharding


class KvSnapshot(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The KV of the first tokens of one sequence on every rank, replicas included."""

    dp_rank: int
    """The data parallel rank that holds it."""
    sharding: KvSharding
    num_tokens: int
    ranks: tuple[bytes, ...]
    """By rank: `[layer][head of this rank][plane][token][byte]`, the same whatever pages the tokens lie in."""

    @classmethod
    def take(
        cls,
        buffers: Sequence[mmap],
        sharding: KvSharding,
        *,
        dp_rank: int = 0,
        num_pages: int,
        page_indices: tuple[int, ...],
        num_tokens: int,
    ) -> "KvSnapshot":
        """Copy out of the regions in `buffers`, by rank. Cost: one copy of the KV."""
        ranks = tuple(
            copy_tokens(
                buffer, sharding.rank_layout, num_pages=num_pages, page_indices=page_indices, num_tokens=num_tokens
            ).tobytes()
            for buffer in buffers
        )
        return cls(dp_rank=dp_rank, sharding=sharding, num_tokens=num_tokens, ranks=ranks)

    def of_rank(self, rank: int) -> NDArray[np.uint8]:
        layout = self.sharding.rank_layout
        shape = (layout.num_layers, layout.num_kv_heads, layout.num_planes, self.num_tokens, layout.slot_bytes)
        return np.frombuffer(self.ranks[rank], np.uint8).reshape(shape)

    def whole(self) -> NDArray[np.uint8]:
        """All heads side by side, each from the first rank that holds it."""
        first_ranks = [self.sharding.ranks_of_set(index)[0] for index in range(self.sharding.num_replica_sets)]
        return np.concatenate([self.of_rank(rank) for rank in first_ranks], axis=1)


def copy_tokens(
    buffer: mmap, layout: KvLayout, *, num_pages: int, page_indices: tuple[int, ...], num_tokens: int
) -> NDArray[np.uint8]:
    """The bytes of the first `num_tokens` tokens on one rank: `[layer][head][plane][token][byte]`."""
    slot_bytes, num_heads, num_planes = layout.slot_bytes, layout.num_kv_heads, layout.num_planes
    shape = (layout.num_layers, num_pages, num_heads, num_planes, layout.page_slots, slot_bytes)
    region_bytes = layout.region_bytes(num_pages)
    region = np.frombuffer(buffer, dtype=np.uint8, count=region_bytes).reshape(shape)
    pages = region[:, list(page_indices[: layout.num_pages_for(num_tokens)])]
    by_token = pages.transpose(0, 2, 3, 1, 4, 5).reshape(layout.num_layers, num_heads, num_planes, -1, slot_bytes)
    return np.ascontiguousarray(by_token[:, :, :, :num_tokens])
