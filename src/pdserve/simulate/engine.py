"""The model of hashes over a paged region, computed a layer a step; what a fabric writes into it is watched."""

import mmap
from collections.abc import Callable
from typing import Any

from pdserve.clock import Clock
from pdserve.engine.port import EngineInfo
from pdserve.kv.shard import KvSharding
from pdserve.layer_counter import REGION_BYTES, RING_OFFSET, RING_TICKS
from pdserve.schedule.batch import Batch, BatchResult, Chunk, PageCopy
from pdserve.shared_region import SharedRegion
from pdserve.simulate.model import (
    LAYOUT,
    MAX_MODEL_LEN,
    SLOT_BYTES,
    TAIL_BYTES,
    first_slot,
    next_token,
    tail_of,
    upper_slot,
)
from pdserve.units import div_ceil

FLUSH_BYTES = 64
"""The spare end of each region, which flushes write to."""


class WatchedBuffer(mmap.mmap):
    """A mapping that reports each slice assigned to it: what a fabric writes; the engine writes through a view."""

    on_write: Callable[[int, int], None] | None = None

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value)
        match key:
            case slice(start=int(start), stop=int(stop)) if start >= 0 and self.on_write is not None:
                self.on_write(start, stop)
            case _:
                pass


class HashEngine:
    """One rank. Lifetime: until `close`."""

    def __init__(self, *, num_pages: int, num_tail_slots: int, clock: Clock) -> None:
        self.info = EngineInfo(
            sharding=KvSharding(layout=LAYOUT),
            num_pages=num_pages,
            num_tail_slots=num_tail_slots,
            tail_slot_bytes=TAIL_BYTES,
            max_model_len=MAX_MODEL_LEN,
            model_fingerprint="hashes",
            pids=(),
        )
        self.kv_region, self.kv_writes = watched_region("kv", LAYOUT.region_bytes(num_pages))
        self.tail_region, self.tail_writes = watched_region("tail", num_tail_slots * TAIL_BYTES)
        self.counter_region = SharedRegion.create(name="counter", num_bytes=REGION_BYTES)
        self._kv = memoryview(self.kv_region.buffer)
        self._tail = memoryview(self.tail_region.buffer)
        self._layer_bytes = LAYOUT.layer_bytes(num_pages)
        self._clock = clock
        self._num_ticks = 0
        self._batch: Batch | None = None
        self._layer_index = 0

    def start(self, batch: Batch) -> None:
        self._batch, self._layer_index = batch, 0
        for copy in batch.copies:
            self._copy_page(copy)

    def step(self) -> BatchResult | None:
        """Compute a layer, or end the pass: then its result. Requires: a pass was started."""
        batch = self._batch
        assert batch is not None
        if self._layer_index < LAYOUT.num_layers:
            for chunk in batch.chunks:
                self._compute(chunk)
            self._layer_index += 1
            self._tick()
            return None
        for chunk in batch.chunks:
            if chunk.tail_slot is not None:
                start = chunk.tail_slot * TAIL_BYTES
                last_slot = self._slot(chunk.page_indices, chunk.stop - 1, layer_index=LAYOUT.num_layers - 1)
                self._tail[start : start + TAIL_BYTES] = tail_of(last_slot)
        self._tick()
        self._batch = None
        now_ns = self._clock.now_ns()
        sampled = [(chunk.sequence_id, (next_token(self._kv_of(chunk)),)) for chunk in batch.chunks if chunk.samples]
        return BatchResult(pass_index=batch.pass_index, sampled=tuple(sampled), started_ns=now_ns, ended_ns=now_ns)

    def read(self, page_indices: tuple[int, ...], num_tokens: int) -> tuple[bytes, ...]:
        """The KV of the first tokens, by layer."""
        pages = page_indices[: div_ceil(num_tokens, LAYOUT.page_slots)]
        starts = [page_index * LAYOUT.page_bytes for page_index in pages]
        return tuple(
            b"".join(self._kv[base + start : base + start + LAYOUT.page_bytes] for start in starts)[
                : num_tokens * SLOT_BYTES
            ]
            for base in range(0, LAYOUT.num_layers * self._layer_bytes, self._layer_bytes)
        )

    def close(self) -> None:
        self._kv.release()
        self._tail.release()
        for region in (self.kv_region, self.tail_region, self.counter_region):
            region.close()

    def _compute(self, chunk: Chunk) -> None:
        for position, token_id in enumerate(chunk.token_ids, start=chunk.start):
            if self._layer_index > 0:
                slot = upper_slot(self._slot(chunk.page_indices, position, layer_index=0))
            elif position > 0:
                slot = first_slot(self._slot(chunk.page_indices, position - 1, layer_index=0), token_id)
            else:
                slot = first_slot(b"", token_id)
            start = self._offset(chunk.page_indices, position, layer_index=self._layer_index)
            self._kv[start : start + SLOT_BYTES] = slot

    def _kv_of(self, chunk: Chunk) -> tuple[bytes, ...]:
        return self.read(chunk.page_indices, chunk.stop)

    def _offset(self, page_indices: tuple[int, ...], position: int, *, layer_index: int) -> int:
        page_position, slot = divmod(position, LAYOUT.page_slots)
        page_start = page_indices[page_position] * LAYOUT.page_bytes
        return layer_index * self._layer_bytes + page_start + slot * SLOT_BYTES

    def _slot(self, page_indices: tuple[int, ...], position: int, *, layer_index: int) -> bytes:
        start = self._offset(page_indices, position, layer_index=layer_index)
        return bytes(self._kv[start : start + SLOT_BYTES])

    def _copy_page(self, copy: PageCopy) -> None:
        for base in range(0, LAYOUT.num_layers * self._layer_bytes, self._layer_bytes):
            source, target = base + copy.source * LAYOUT.page_bytes, base + copy.target * LAYOUT.page_bytes
            self._kv[target : target + LAYOUT.page_bytes] = self._kv[source : source + LAYOUT.page_bytes]

    def _tick(self) -> None:
        self._num_ticks += 1
        ring_start = RING_OFFSET + self._num_ticks % RING_TICKS * 8
        self.counter_region.buffer[ring_start : ring_start + 8] = self._clock.now_ns().to_bytes(8, "little")
        self.counter_region.buffer[0:8] = self._num_ticks.to_bytes(8, "little")


def watched_region(name: str, num_bytes: int) -> tuple[SharedRegion, WatchedBuffer]:
    region = SharedRegion.create(name=name, num_bytes=num_bytes + FLUSH_BYTES)
    region.buffer.close()
    watched = WatchedBuffer(region.fd, region.num_bytes)
    region.buffer = watched
    return region, watched
