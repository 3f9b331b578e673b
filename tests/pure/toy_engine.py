"""The toy model on the ranks of one engine, over paged regions, computed one layer a step."""

import mmap
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tests.pure.toy_model import (
    NUM_QUERY_HEADS,
    TAIL_BYTES,
    UNLIKELY,
    VECTOR_BYTES,
    kv_head_of,
    next_token,
    seed_after,
    tail_after,
    vector_of,
)

from pdserve.clock import Clock
from pdserve.engine.port import EngineInfo
from pdserve.ids import SequenceId
from pdserve.kv.shard import KvSharding
from pdserve.layer_counter import REGION_BYTES, RING_OFFSET, RING_TICKS
from pdserve.sampling import TokenLogprobs
from pdserve.schedule.batch import Batch, BatchResult, Chunk, PageCopy
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
        num_planes, page_slots = self._pages.shape[3:5]
        positions = np.arange(chunk.start, chunk.stop)
        pages, slots = np.array(chunk.page_indices)[positions // page_slots], positions % page_slots
        for head in self.heads:
            seeds = self._seeds(chunk, head, layer_index=layer_index)
            vectors = b"".join(
                vector_of(seed, layer_index=layer_index, plane=plane) for seed in seeds for plane in range(num_planes)
            )
            self._pages[layer_index, pages, head - self.heads.start, :, slots] = np.frombuffer(
                vectors, np.uint8
            ).reshape(len(seeds), num_planes, VECTOR_BYTES)

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


class ToyEngine:
    """The ranks of one data parallel rank in one object. Lifetime: until `close`."""

    def __init__(
        self, sharding: KvSharding, *, num_pages: int, num_tail_slots: int, max_model_len: int, clock: Clock
    ) -> None:
        self.info = EngineInfo(
            sharding=sharding,
            num_pages=num_pages,
            num_tail_slots=num_tail_slots,
            tail_slot_bytes=TAIL_BYTES,
            max_model_len=max_model_len,
            model_fingerprint="toy",
            pids=(),
        )
        self.ranks = tuple(RankKv(sharding, rank=rank, num_pages=num_pages) for rank in range(sharding.num_ranks))
        self.tail_region = watched_region("tail", num_tail_slots * TAIL_BYTES + SPARE_BYTES)
        self.counter_region = SharedRegion.create(name="counter", num_bytes=REGION_BYTES)
        self._tail = SharedRegion.from_fd(os.dup(self.tail_region.fd))
        self._clock = clock
        self._num_ticks = 0
        self._batch: Batch | None = None
        self._layer_index = 0
        self._end_token_ids: dict[SequenceId, tuple[int, ...]] = {}

    def start(self, batch: Batch) -> None:
        assert self._batch is None
        self._batch, self._layer_index = batch, 0
        for sequence_id in batch.ended_sequences:
            self._end_token_ids.pop(sequence_id, None)
        for new in batch.new_sequences:
            self._end_token_ids[new.sequence_id] = new.sampling.stop_token_ids
        for copy in batch.copies:
            for rank in self.ranks:
                rank.copy_page(copy)

    def step(self) -> BatchResult | None:
        """Compute a layer on all ranks, or end the pass: then its result."""
        batch = self._batch
        assert batch is not None
        if self._layer_index < self.info.sharding.layout.num_layers:
            for chunk in batch.chunks:
                for rank in self.ranks:
                    rank.compute(chunk, layer_index=self._layer_index)
            self._layer_index += 1
            self._tick()
            return None
        for chunk in batch.chunks:
            if chunk.tail_slot is not None:
                start = chunk.tail_slot * TAIL_BYTES
                self._tail.buffer[start : start + TAIL_BYTES] = self._tail_of(chunk)
        self._tick()
        self._batch = None
        now_ns = self._clock.now_ns()
        return BatchResult(
            pass_index=batch.pass_index,
            sampled=tuple((chunk.sequence_id, self._sample(chunk)) for chunk in batch.chunks if chunk.samples),
            prompt_logprobs=tuple(
                (chunk.sequence_id, self._prompt_logprobs(chunk))
                for chunk in batch.chunks
                if chunk.num_prompt_logprobs is not None
            ),
            started_ns=now_ns,
            ended_ns=now_ns,
        )

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()
        for region in (self.tail_region, self.counter_region, self._tail):
            region.close()

    def _query_heads(self) -> list[tuple[RankKv, int]]:
        """Each query head's rank and KV head."""
        queries_per_rank = NUM_QUERY_HEADS // len(self.ranks)
        layout = self.info.sharding.layout
        return [(self.ranks[query // queries_per_rank], kv_head_of(layout, query)) for query in range(NUM_QUERY_HEADS)]

    def _sample(self, chunk: Chunk) -> tuple[int, ...]:
        """The token after the last known one, and on while each is the draft in its place and ends nothing."""
        num_known = len(chunk.token_ids) - chunk.num_drafts
        end_token_ids = self._end_token_ids[chunk.sequence_id]
        sampled = [self._token_after(chunk, chunk.start + num_known)]
        for num_right, draft in enumerate(chunk.token_ids[num_known:], start=1):
            if sampled[-1] != draft or draft in end_token_ids:
                break
            sampled.append(self._token_after(chunk, chunk.start + num_known + num_right))
        return tuple(sampled)

    def _prompt_logprobs(self, chunk: Chunk) -> tuple[TokenLogprobs, ...]:
        """The model is sure: it gives the token that it would sample the probability 1, and others next to none."""
        known = chunk.token_ids[1 : len(chunk.token_ids) - chunk.num_drafts]
        following = [*known, *([] if chunk.next_token_id is None else [chunk.next_token_id])]
        entries: list[TokenLogprobs] = []
        for position, token_id in enumerate(following, start=chunk.start + 1):
            logprob = 0.0 if token_id == self._token_after(chunk, position) else UNLIKELY
            entries.append(TokenLogprobs(token_id=token_id, logprob=logprob, top=()))
        return tuple(entries)

    def _token_after(self, chunk: Chunk, num_tokens: int) -> int:
        """What the model says after the first tokens of a sequence."""
        kv = {rank: rank.read(chunk.page_indices, num_tokens) for rank in self.ranks}
        return next_token(kv[rank][:, head - rank.heads.start].tobytes() for rank, head in self._query_heads())

    def _tail_of(self, chunk: Chunk) -> bytes:
        return tail_after(
            rank.seed_at(chunk.page_indices, chunk.stop - 1, head=head) for rank, head in self._query_heads()
        )

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
