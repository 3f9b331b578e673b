"""A model made of hashes: every byte of its KV cache is known in advance, and every wrong byte changes the answer.

The first K of a position is the hash of the first K before it and of its token; every other K and V is a hash of that.
The next token is a hash of all of them, read from the pages.
"""

import hashlib
import mmap
import os
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from pdserve.clock import Clock
from pdserve.engine.port import EngineInfo
from pdserve.kv.layout import KvLayout
from pdserve.layer_counter import REGION_BYTES, RING_OFFSET, RING_TICKS
from pdserve.schedule.batch import Batch, BatchResult, Chunk
from pdserve.shared_region import SharedRegion

LAYOUT = KvLayout(num_layers=2, num_kv_heads=1, head_dim=2, page_slots=4, dtype="float32")
VOCABULARY = 97
TAIL_BYTES = 64
SPARE_BYTES = 8
"""The end of the tail region, which flushes write to."""


def digest(*parts: bytes) -> bytes:
    return hashlib.blake2b(b"".join(parts), digest_size=LAYOUT.slot_bytes).digest()


def first_key(before: bytes, token_id: int) -> bytes:
    return digest(before, token_id.to_bytes(4, "little"))


def derived(first: bytes, *, layer_index: int, is_value: bool) -> bytes:
    """A K or V of a position from its first K."""
    return first if layer_index == 0 and not is_value else digest(first, bytes([layer_index, is_value]))


@lru_cache(maxsize=4096)
def first_keys(token_ids: tuple[int, ...]) -> tuple[bytes, ...]:
    keys = [bytes(LAYOUT.slot_bytes)]
    for token_id in token_ids:
        keys.append(first_key(keys[-1], token_id))
    return tuple(keys[1:])


def token_kv(first: bytes) -> bytes:
    """All KV of one position, in the order in which the next token is hashed."""
    return b"".join(
        derived(first, layer_index=layer_index, is_value=is_value)
        for layer_index in range(LAYOUT.num_layers)
        for is_value in (False, True)
    )


def next_token(kv_of_all_positions: Sequence[bytes]) -> int:
    return int.from_bytes(digest(*kv_of_all_positions), "little") % VOCABULARY


@lru_cache(maxsize=1024)
def reference_tokens(prompt: tuple[int, ...], max_tokens: int) -> tuple[int, ...]:
    """What the model answers, computed without pages."""
    token_ids = prompt
    for _ in range(max_tokens):
        token_ids += (next_token([token_kv(key) for key in first_keys(token_ids)]),)
    return token_ids[len(prompt) :]


def reference_tail(computed_token_ids: tuple[int, ...]) -> bytes:
    return first_keys(computed_token_ids)[-1] * (TAIL_BYTES // LAYOUT.slot_bytes)


class WatchedBuffer(mmap.mmap):
    """A mapping that reports each slice assigned to it: what a fabric writes, not what an engine does."""

    on_write: Callable[[int, int], None] | None = None

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value)
        match key:
            case slice(start=int(start), stop=int(stop)) if self.on_write is not None:
                self.on_write(start, stop)
            case _:
                pass


class ToyEngine:
    """The regions of one worker and what computes in them, one layer a step. Lifetime: until `close`."""

    def __init__(self, *, num_pages: int, num_tail_slots: int, max_model_len: int, clock: Clock) -> None:
        self.info = EngineInfo(
            layout=LAYOUT,
            num_pages=num_pages,
            num_tail_slots=num_tail_slots,
            tail_slot_bytes=TAIL_BYTES,
            max_model_len=max_model_len,
            model_fingerprint="toy",
            pid=0,
        )
        self.kv_region = watched_region("kv", LAYOUT.region_bytes(num_pages))
        self.tail_region = watched_region("tail", num_tail_slots * TAIL_BYTES + SPARE_BYTES)
        self.counter_region = SharedRegion.create(name="counter", num_bytes=REGION_BYTES)
        self._kv = SharedRegion.from_fd(os.dup(self.kv_region.fd))
        self._tail = SharedRegion.from_fd(os.dup(self.tail_region.fd))
        self._clock = clock
        self._num_ticks = 0
        self._batch: Batch | None = None
        self._layer_index = 0

    def start(self, batch: Batch) -> None:
        assert self._batch is None
        self._batch, self._layer_index = batch, 0

    def step(self) -> BatchResult | None:
        """Compute a layer, or end the pass: then its result."""
        batch = self._batch
        assert batch is not None
        if self._layer_index < LAYOUT.num_layers:
            for chunk in batch.chunks:
                self._compute(chunk, self._layer_index)
            self._layer_index += 1
            self._tick()
            return None
        for chunk in batch.chunks:
            if chunk.tail_slot is not None:
                hidden = self.read_slot(chunk.page_indices, chunk.stop - 1, layer_index=0, is_value=False)
                start = chunk.tail_slot * TAIL_BYTES
                self._tail.buffer[start : start + TAIL_BYTES] = hidden * (TAIL_BYTES // len(hidden))
        self._tick()
        self._batch = None
        now_ns = self._clock.now_ns()
        sampled = tuple((chunk.sequence_id, self._sample(chunk)) for chunk in batch.chunks if chunk.samples)
        return BatchResult(pass_index=batch.pass_index, sampled=sampled, started_ns=now_ns, ended_ns=now_ns)

    def read_slot(self, page_indices: Sequence[int], position: int, *, layer_index: int, is_value: bool) -> bytes:
        start = self._slot_offset(page_indices, position, layer_index=layer_index, is_value=is_value)
        return self._kv.buffer[start : start + LAYOUT.slot_bytes]

    def read_token(self, page_indices: Sequence[int], position: int) -> bytes:
        """All KV of one position, as `token_kv`."""
        return b"".join(
            self.read_slot(page_indices, position, layer_index=layer_index, is_value=is_value)
            for layer_index in range(LAYOUT.num_layers)
            for is_value in (False, True)
        )

    def close(self) -> None:
        for region in (self.kv_region, self.tail_region, self.counter_region, self._kv, self._tail):
            region.close()

    def _compute(self, chunk: Chunk, layer_index: int) -> None:
        pages = chunk.page_indices
        for position, token_id in enumerate(chunk.token_ids, start=chunk.start):
            if layer_index == 0:
                before = bytes(LAYOUT.slot_bytes)
                if position > 0:
                    before = self.read_slot(pages, position - 1, layer_index=0, is_value=False)
                first = first_key(before, token_id)
            else:
                first = self.read_slot(pages, position, layer_index=0, is_value=False)
            for is_value in (False, True):
                start = self._slot_offset(pages, position, layer_index=layer_index, is_value=is_value)
                self._kv.buffer[start : start + LAYOUT.slot_bytes] = derived(
                    first, layer_index=layer_index, is_value=is_value
                )

    def _sample(self, chunk: Chunk) -> int:
        return next_token([self.read_token(chunk.page_indices, position) for position in range(chunk.stop)])

    def _slot_offset(self, page_indices: Sequence[int], position: int, *, layer_index: int, is_value: bool) -> int:
        page_index = page_indices[position // LAYOUT.page_slots]
        page = LAYOUT.page_offset(layer_index=layer_index, page_index=page_index, num_pages=self.info.num_pages)
        slot = is_value * LAYOUT.page_slots + position % LAYOUT.page_slots
        return page + slot * LAYOUT.slot_bytes

    def _tick(self) -> None:
        self._num_ticks += 1
        ring_start = RING_OFFSET + self._num_ticks % RING_TICKS * 8
        self.counter_region.buffer[ring_start : ring_start + 8] = self._clock.now_ns().to_bytes(8, "little")
        self.counter_region.buffer[0:8] = self._num_ticks.to_bytes(8, "little")


def watched_region(name: str, num_bytes: int) -> SharedRegion:
    region = SharedRegion.create(name=name, num_bytes=num_bytes)
    region.buffer.close()
    region.buffer = WatchedBuffer(region.fd, region.num_bytes)
    return region
