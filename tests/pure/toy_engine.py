"""The toy model on the ranks of one engine, over paged regions, computed one layer a step."""

import os
from collections.abc import Sequence

from tests.pure.toy_drafter import ToyDrafter
from tests.pure.toy_kv import SPARE_BYTES, RankKv, watched_region
from tests.pure.toy_model import NUM_QUERY_HEADS, TAIL_BYTES, UNLIKELY, VOCABULARY, kv_head_of, next_token, tail_after

from pdserve.clock import Clock
from pdserve.engine.port import EngineInfo
from pdserve.ids import SequenceId
from pdserve.kv.layout import KvLayout
from pdserve.kv.shard import KvSharding
from pdserve.layer_counter import REGION_BYTES, RING_OFFSET, RING_TICKS
from pdserve.sampling import TokenLogprobs
from pdserve.schedule.batch import Batch, BatchResult, Chunk
from pdserve.shared_region import SharedRegion


class ToyEngine:
    """The ranks of one data parallel rank in one object. Lifetime: until `close`."""

    def __init__(
        self,
        sharding: KvSharding,
        *,
        draft_layout: KvLayout | None = None,
        num_pages: int,
        num_tail_slots: int,
        max_model_len: int,
        clock: Clock,
    ) -> None:
        self.info = EngineInfo(
            sharding=sharding,
            num_pages=num_pages,
            num_tail_slots=num_tail_slots,
            tail_slot_bytes=TAIL_BYTES,
            max_model_len=max_model_len,
            vocab_size=VOCABULARY,
            draft_layout=draft_layout,
            model_fingerprint="toy",
            pids=(),
        )
        self.ranks = tuple(RankKv(sharding, rank=rank, num_pages=num_pages) for rank in range(sharding.num_ranks))
        self.drafter = None if draft_layout is None else ToyDrafter(draft_layout, num_pages=num_pages)
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
        if self.drafter is not None:
            self.drafter.start(batch.ended_sequences)
        caches = [*self.ranks, *([] if self.drafter is None else [self.drafter.kv])]
        for copy in batch.copies:
            for cache in caches:
                cache.copy_page(copy)

    def step(self) -> BatchResult | None:
        """Compute a layer on all ranks, or one of the drafter, or end the pass: then its result."""
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
                tail = self._hidden_at(chunk.page_indices, chunk.stop - 1)
                self._tail.buffer[start : start + TAIL_BYTES] = tail
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
        if self.drafter is not None:
            self.drafter.close()
        for region in (self.tail_region, self.counter_region, self._tail):
            region.close()

    def _compute_layer(self, batch: Batch) -> None:
        draft_layer = self._layer_index - self.info.sharding.layout.num_layers
        if draft_layer < 0:
            for chunk in batch.chunks:
                for rank in self.ranks:
                    rank.compute(chunk, layer_index=self._layer_index)
            return
        assert self.drafter is not None
        if draft_layer == 0:
            for chunk in batch.chunks:
                self._follow(self.drafter, chunk)
        self.drafter.compute(draft_layer)

    def _follow(self, drafter: ToyDrafter, chunk: Chunk) -> None:
        sampled = self._sample(chunk) if chunk.samples else ()
        num_kept = len(chunk.token_ids) - chunk.num_drafts + max(len(sampled) - 1, 0)
        hidden = [self._hidden_at(chunk.page_indices, chunk.start + index) for index in range(num_kept)]
        carry = None
        if chunk.carry_slot is not None:
            carry = self._tail.buffer[chunk.carry_slot * TAIL_BYTES : (chunk.carry_slot + 1) * TAIL_BYTES]
        drafter.follow(chunk, chunk.token_ids[:num_kept], hidden, sampled=sampled[-1:], carry=carry)

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

    def _hidden_at(self, page_indices: Sequence[int], position: int) -> bytes:
        return tail_after(rank.seed_at(page_indices, position, head=head) for rank, head in self._query_heads())

    def _tick(self) -> None:
        self._num_ticks += 1
        ring_start = RING_OFFSET + self._num_ticks % RING_TICKS * 8
        self.counter_region.buffer[ring_start : ring_start + 8] = self._clock.now_ns().to_bytes(8, "little")
        self.counter_region.buffer[0:8] = self._num_ticks.to_bytes(8, "little")
