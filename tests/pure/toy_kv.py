"""The toy model's KV on one rank: a region that reports what a fabric writes to it, and the pages in it."""

import mmap
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tests.pure.toy_model import VECTOR_BYTES, seed_after, vector_of

from pdserve.kv.shard import KvSharding
from pdserve.schedule.batch import Chunk, PageCopy
from pdserve.shared_region import SharedRegion

SPARE_BYTES = 64
"""The end of each region, which flushes write to."""


class WatchedBuffer(mmap.mmap):
    """A mapping that reports each slice assigned to it: what a fabric writes, not what an engine does."""

    on_write: Callable[[int, int], None] | None = None

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value)
        match key:
            case slice(start=int(start), stop=int(stop)) if start >= 0 and stop > 0 and self.on_write is not None:
                self.on_write(start, stop)
            case _:
                pass


class RankKv:
    """The KV of one rank: a region that a fabric uses, and the mapping through which the rank computes."""

    def __init__(self, sharding: KvSharding, *, rank: int, num_pages: int) -> None:
        self.heads = sharding.heads_of(rank)
        layout = sharding.rank_layout
        num_bytes = layout.region_bytes(num_pages)
        self.region = watched_region(f"kv{rank}", num_bytes + SPARE_BYTES)
        self._mapping = SharedRegion.from_fd(os.dup(self.region.fd))
        shape = (layout.num_layers, num_pages, len(self.heads), layout.num_planes, layout.page_slots, VECTOR_BYTES)
        self._pages = np.frombuffer(self._mapping.buffer, np.uint8, count=num_bytes).reshape(shape)
        """`[layer][page][head][plane][slot][byte]`."""

    def read(self, page_indices: Sequence[int], num_tokens: int) -> NDArray[np.uint8]:
        """A copy of the KV of the first tokens: `[layer][head][plane][token][byte]`."""
        num_layers, _, num_heads, num_planes, page_slots, _ = self._pages.shape
        pages = self._pages[:, list(page_indices[: -(-num_tokens // page_slots)])]
        by_token = pages.transpose(0, 2, 3, 1, 4, 5).reshape(num_layers, num_heads, num_planes, -1, VECTOR_BYTES)
        return by_token[:, :, :, :num_tokens]

    def read_page(self, page_index: int, *, layer_index: int) -> NDArray[np.uint8]:
        """A copy: `[head][plane][slot][byte]`."""
        return self._pages[layer_index, page_index].copy()

    def seed_at(self, page_indices: Sequence[int], position: int, *, head: int) -> bytes:
        page_slots = self._pages.shape[4]
        page = self._pages[0, page_indices[position // page_slots], head - self.heads.start]
        return page[0, position % page_slots].tobytes()

    def compute(self, chunk: Chunk, *, layer_index: int) -> None:
        """Write the vectors of a chunk's tokens in one layer."""
        for head in self.heads:
            seeds = self._seeds(chunk, head, layer_index=layer_index)
            self.write(chunk.page_indices, chunk.start, seeds, head=head, layer_index=layer_index)

    def write(
        self, page_indices: Sequence[int], start: int, seeds: Sequence[bytes], *, head: int, layer_index: int
    ) -> None:
        """Write the vectors that come of the seeds, from position `start` on."""
        num_planes, page_slots = self._pages.shape[3:5]
        positions = np.arange(start, start + len(seeds))
        pages, slots = np.array(page_indices)[positions // page_slots], positions % page_slots
        vectors = b"".join(
            vector_of(seed, layer_index=layer_index, plane=plane) for seed in seeds for plane in range(num_planes)
        )
        self._pages[layer_index, pages, head - self.heads.start, :, slots] = np.frombuffer(vectors, np.uint8).reshape(
            len(seeds), num_planes, VECTOR_BYTES
        )

    def copy_page(self, copy: PageCopy) -> None:
        self._pages[:, copy.target] = self._pages[:, copy.source]

    def close(self) -> None:
        self._pages = np.zeros((0,) * 6, np.uint8)  # lets go of the mapping
        self._mapping.close()
        self.region.close()

    def _seeds(self, chunk: Chunk, head: int, *, layer_index: int) -> list[bytes]:
        """Of the chunk's positions: made in the first layer, read from it in the others."""
        if layer_index > 0:
            return [
                self.seed_at(chunk.page_indices, position, head=head) for position in range(chunk.start, chunk.stop)
            ]
        before = self.seed_at(chunk.page_indices, chunk.start - 1, head=head) if chunk.start > 0 else b""
        seeds = [before]
        for token_id in chunk.token_ids:
            seeds.append(seed_after(seeds[-1], token_id, head=head))
        return seeds[1:]


def watched_region(name: str, num_bytes: int) -> SharedRegion:
    region = SharedRegion.create(name=name, num_bytes=num_bytes)
    region.buffer.close()
    region.buffer = WatchedBuffer(region.fd, region.num_bytes)
    return region
