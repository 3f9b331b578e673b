"""The KV of one rank: a region that reports what a fabric writes to it, and the vectors in its pages."""

import mmap
from collections.abc import Callable, Sequence
from typing import Any

from pdserve.kv.shard import KvSharding
from pdserve.schedule.batch import PageCopy
from pdserve.shared_region import SharedRegion
from pdserve.simulate.model import HeadKv, vector_of

FLUSH_BYTES = 64
"""The spare end of each region, which flushes write to."""


class WatchedBuffer(mmap.mmap):
    """A mapping that reports each slice assigned to it: what a fabric writes; an engine writes through a view."""

    on_write: Callable[[int, int], None] | None = None

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value)
        match key:
            case slice(start=int(start), stop=int(stop)) if start >= 0 and self.on_write is not None:
                self.on_write(start, stop)
            case _:
                pass


def watched_region(name: str, num_bytes: int) -> tuple[SharedRegion, WatchedBuffer]:
    region = SharedRegion.create(name=name, num_bytes=num_bytes + FLUSH_BYTES)
    region.buffer.close()
    watched = WatchedBuffer(region.fd, region.num_bytes)
    region.buffer = watched
    return region, watched


class RankKv:
    """Lifetime: until `close`. Heads are numbered as in the whole cache."""

    def __init__(self, sharding: KvSharding, *, rank: int, num_pages: int) -> None:
        self.heads = sharding.heads_of(rank)
        self.layout = sharding.rank_layout
        self.region, self.writes = watched_region(f"kv{rank}", self.layout.region_bytes(num_pages))
        self._view = memoryview(self.region.buffer)
        self._layer_bytes = self.layout.layer_bytes(num_pages)
        self._page_bytes = self.layout.page_bytes
        self._plane_bytes = self.layout.page_slots * self.layout.slot_bytes

    def read(self, page_indices: Sequence[int], num_tokens: int, *, head: int) -> HeadKv:
        """A copy of the vectors of the first tokens."""
        return tuple(
            tuple(
                self._vectors(page_indices, num_tokens, self._start(head, layer_index, plane))
                for plane in range(self.layout.num_planes)
            )
            for layer_index in range(self.layout.num_layers)
        )

    def read_page(self, page_index: int, num_slots: int, *, head: int, layer_index: int, plane: int) -> bytes:
        """A copy of the first vectors of a page."""
        return self._vectors([page_index], num_slots, self._start(head, layer_index, plane))

    def seed_at(self, page_indices: Sequence[int], position: int, *, head: int) -> bytes:
        page_position, slot = divmod(position, self.layout.page_slots)
        start = self._start(head, 0, 0) + page_indices[page_position] * self._page_bytes + slot * self.layout.slot_bytes
        return bytes(self._view[start : start + self.layout.slot_bytes])

    def write(
        self, page_indices: Sequence[int], start: int, seeds: Sequence[bytes], *, head: int, layer_index: int
    ) -> None:
        """Write the vectors that come of the seeds, from position `start` on."""
        slot_bytes = self.layout.slot_bytes
        for plane in range(self.layout.num_planes):
            base = self._start(head, layer_index, plane)
            for position, seed in enumerate(seeds, start):
                page_position, slot = divmod(position, self.layout.page_slots)
                offset = base + page_indices[page_position] * self._page_bytes + slot * slot_bytes
                self._view[offset : offset + slot_bytes] = vector_of(seed, layer_index=layer_index, plane=plane)

    def copy_page(self, copy: PageCopy) -> None:
        for base in range(0, self.layout.num_layers * self._layer_bytes, self._layer_bytes):
            source, target = base + copy.source * self._page_bytes, base + copy.target * self._page_bytes
            self._view[target : target + self._page_bytes] = self._view[source : source + self._page_bytes]

    def close(self) -> None:
        self._view.release()
        self.region.close()

    def _start(self, head: int, layer_index: int, plane: int) -> int:
        """Offset of the first slot of page 0."""
        in_page = (head - self.heads.start) * self.layout.head_bytes + plane * self._plane_bytes
        return layer_index * self._layer_bytes + in_page

    def _vectors(self, page_indices: Sequence[int], num_tokens: int, start: int) -> bytes:
        num_whole, num_rest = divmod(num_tokens, self.layout.page_slots)
        starts = [start + page_index * self._page_bytes for page_index in page_indices[: num_whole + bool(num_rest)]]
        parts = [self._view[begin : begin + self._plane_bytes] for begin in starts]
        if num_rest:
            parts[-1] = parts[-1][: num_rest * self.layout.slot_bytes]
        return b"".join(parts)
