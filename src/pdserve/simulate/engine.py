"""The model of hashes on the ranks of one engine, over paged regions, computed a layer a step."""

from collections.abc import Sequence

from pdserve.clock import Clock
from pdserve.engine.port import EngineInfo
from pdserve.kv.shard import KvSharding
from pdserve.layer_counter import REGION_BYTES, RING_OFFSET, RING_TICKS
from pdserve.schedule.batch import Batch, BatchResult, Chunk
from pdserve.shared_region import SharedRegion
from pdserve.simulate.drafter import HashDrafter
from pdserve.simulate.model import (
    MAX_MODEL_LEN,
    NUM_QUERY_HEADS,
    TAIL_BYTES,
    VOCABULARY,
    HashModel,
    HeadKv,
    hidden_of,
    kv_head_of,
    next_token,
    seed_after,
)
from pdserve.simulate.rank_kv import RankKv, watched_region


class HashEngine:
    """One data parallel rank, with all its tensor parallel ranks. Lifetime: until `close`."""

    def __init__(
        self, model: HashModel, *, num_ranks: int = 1, num_pages: int, num_tail_slots: int, clock: Clock
    ) -> None:
        self.model = model
        sharding = KvSharding(layout=model.layout, num_ranks=num_ranks)
        self.info = EngineInfo(
            sharding=sharding,
            num_pages=num_pages,
            num_tail_slots=num_tail_slots,
            tail_slot_bytes=TAIL_BYTES,
            max_model_len=MAX_MODEL_LEN,
            vocab_size=VOCABULARY,
            draft_layout=model.draft_layout,
            model_fingerprint="hashes",
            pids=(),
        )
        self.ranks = tuple(RankKv(sharding, rank=rank, num_pages=num_pages) for rank in range(num_ranks))
        draft_layout = model.draft_layout
        self.drafter = HashDrafter(draft_layout, num_pages=num_pages) if draft_layout is not None else None
        self.tail_region, self.tail_writes = watched_region("tail", num_tail_slots * TAIL_BYTES)
        self.counter_region = SharedRegion.create(name="counter", num_bytes=REGION_BYTES)
        self._tail = memoryview(self.tail_region.buffer)
        self._query_heads = self._placed_query_heads()
        self._clock = clock
        self._num_ticks = 0
        self._batch: Batch | None = None
        self._layer_index = 0

    def start(self, batch: Batch) -> None:
        self._batch, self._layer_index = batch, 0
        caches = self.ranks
        if self.drafter is not None:
            self.drafter.start(batch.ended_sequences)
            caches = (*caches, self.drafter.kv)
        for copy in batch.copies:
            for cache in caches:
                cache.copy_page(copy)

    def step(self) -> BatchResult | None:
        """Compute a layer on all ranks, or one of the drafter, or end the pass: then its result. Requires: a pass."""
        batch = self._batch
        assert batch is not None
        if self._layer_index < self.info.num_counted_layers:
            self._compute_layer(batch)
            self._layer_index += 1
            self._tick()
            return None
        for chunk in batch.chunks:
            if chunk.tail_slot is not None:
                start = chunk.tail_slot * TAIL_BYTES
                self._tail[start : start + TAIL_BYTES] = self._hidden_at(chunk.page_indices, chunk.stop - 1)
        self._tick()
        self._batch = None
        now_ns = self._clock.now_ns()
        sampled = tuple((chunk.sequence_id, self._sample(chunk)) for chunk in batch.chunks if chunk.samples)
        return BatchResult(pass_index=batch.pass_index, sampled=sampled, started_ns=now_ns, ended_ns=now_ns)

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()
        if self.drafter is not None:
            self.drafter.close()
        self._tail.release()
        for region in (self.tail_region, self.counter_region):
            region.close()

    def _placed_query_heads(self) -> list[tuple[int, int]]:
        """Each query head's rank and KV head."""
        queries_per_rank = NUM_QUERY_HEADS // len(self.ranks)
        layout = self.info.sharding.layout
        return [(query // queries_per_rank, kv_head_of(layout, query)) for query in range(NUM_QUERY_HEADS)]

    def _compute_layer(self, batch: Batch) -> None:
        draft_layer = self._layer_index - self.info.sharding.layout.num_layers
        if draft_layer < 0:
            for chunk in batch.chunks:
                for rank in self.ranks:
                    self._compute(rank, chunk)
            return
        assert self.drafter is not None
        if draft_layer == 0:
            for chunk in batch.chunks:
                self._follow(self.drafter, chunk)
        self.drafter.compute(draft_layer)

    def _compute(self, rank: RankKv, chunk: Chunk) -> None:
        """A chunk's vectors in one layer of a rank: the seeds are made in the first, and read from it in the others."""
        for head in rank.heads:
            if self._layer_index > 0:
                positions = range(chunk.start, chunk.stop)
                seeds = [rank.seed_at(chunk.page_indices, position, head=head) for position in positions]
            else:
                last = rank.seed_at(chunk.page_indices, chunk.start - 1, head=head) if chunk.start > 0 else b""
                seeds: list[bytes] = []
                for token_id in chunk.token_ids:
                    last = seed_after(last, token_id, head=head)
                    seeds.append(last)
            rank.write(chunk.page_indices, chunk.start, seeds, head=head, layer_index=self._layer_index)

    def _follow(self, drafter: HashDrafter, chunk: Chunk) -> None:
        sampled = self._sample(chunk) if chunk.samples else ()
        num_kept = len(chunk.token_ids) - chunk.num_drafts + max(len(sampled) - 1, 0)
        hidden = [self._hidden_at(chunk.page_indices, chunk.start + index) for index in range(num_kept)]
        carry = None
        if chunk.carry_slot is not None:
            carry = bytes(self._tail[chunk.carry_slot * TAIL_BYTES : (chunk.carry_slot + 1) * TAIL_BYTES])
        drafter.follow(chunk, chunk.token_ids[:num_kept], hidden, sampled=sampled[-1:], carry=carry)

    def _sample(self, chunk: Chunk) -> tuple[int, ...]:
        """The token after the last known one, and on while each is the draft in its place."""
        num_known = len(chunk.token_ids) - chunk.num_drafts
        sampled = [self._token_after(chunk, chunk.start + num_known)]
        for num_right, draft in enumerate(chunk.token_ids[num_known:], start=1):
            if sampled[-1] != draft:
                break
            sampled.append(self._token_after(chunk, chunk.start + num_known + num_right))
        return tuple(sampled)

    def _token_after(self, chunk: Chunk, num_tokens: int) -> int:
        """What the model says after the first tokens of a sequence."""
        read: dict[tuple[int, int], HeadKv] = {}
        for rank, head in self._query_heads:
            if (rank, head) not in read:
                read[rank, head] = self.ranks[rank].read(chunk.page_indices, num_tokens, head=head)
        return next_token(read[place] for place in self._query_heads)

    def _hidden_at(self, page_indices: Sequence[int], position: int) -> bytes:
        return hidden_of(
            self.ranks[rank].seed_at(page_indices, position, head=head) for rank, head in self._query_heads
        )

    def _tick(self) -> None:
        self._num_ticks += 1
        ring_start = RING_OFFSET + self._num_ticks % RING_TICKS * 8
        self.counter_region.buffer[ring_start : ring_start + 8] = self._clock.now_ns().to_bytes(8, "little")
        self.counter_region.buffer[0:8] = self._num_ticks.to_bytes(8, "little")
