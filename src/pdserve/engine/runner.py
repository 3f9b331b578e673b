"""One forward pass over a batch: check it, compute it, write tails, sample, tick.

Shape suffixes: T tokens of all chunks; R rows that are needed after the last layer (tails and samples); E hidden.
"""

import time

import numpy as np
import torch

from pdserve._kernels import CounterTicker
from pdserve.engine.executor import Executor
from pdserve.engine.kv_storage import KvStorage
from pdserve.engine.sampler import Sampler
from pdserve.errors import InternalError
from pdserve.ids import SequenceId
from pdserve.model.config import ModelConfig
from pdserve.schedule.batch import Batch, BatchResult, Chunk


class Runner:
    """Threads: one at a time."""

    def __init__(self, *, config: ModelConfig, storage: KvStorage, executor: Executor) -> None:
        self._config = config
        self._storage = storage
        self._executor = executor
        self._sampler = Sampler(vocab_size=config.vocab_size)
        self._ticker = CounterTicker(np.frombuffer(storage.counter_region.buffer, dtype=np.uint8))
        self._next_pass_index = 0

    def run(self, batch: Batch) -> BatchResult:
        """Raises: `InternalError` for a batch that breaks the contract, before any byte of KV is written."""
        started_ns = time.monotonic_ns()
        for new in batch.new_sequences:
            self._sampler.add(new)
        self._check(batch)
        self._next_pass_index += 1
        x_TE = self._executor.forward(batch.chunks, self._tick_layer)
        sampled = self._finish(batch.chunks, x_TE)
        self._ticker.tick()
        self._sampler.forget(batch.ended_sequences)
        return BatchResult(
            pass_index=batch.pass_index, sampled=sampled, started_ns=started_ns, ended_ns=time.monotonic_ns()
        )

    def _tick_layer(self, layer_index: int) -> None:
        self._ticker.tick()

    def _finish(self, chunks: tuple[Chunk, ...], x_TE: torch.Tensor) -> tuple[tuple[SequenceId, int], ...]:
        """Writes the tails and samples: only the last rows of the chunks that ask for it pass the final norm."""
        needed: list[tuple[int, Chunk]] = []
        stop = 0
        for chunk in chunks:
            stop += len(chunk.token_ids)
            if chunk.samples or chunk.tail_slot is not None:
                needed.append((stop - 1, chunk))
        if not needed:
            return ()
        normed_RE = self._executor.final_norm(x_TE[[row for row, _ in needed]])
        for row, (_, chunk) in enumerate(needed):
            if chunk.tail_slot is not None:
                self._storage.tails_IE[chunk.tail_slot] = normed_RE[row]
        sampling = [(row, chunk.sequence_id) for row, (_, chunk) in enumerate(needed) if chunk.samples]
        if not sampling:
            return ()
        sequence_ids = [sequence_id for _, sequence_id in sampling]
        logits_RV = self._executor.logits(normed_RE[[row for row, _ in sampling]])
        return tuple(zip(sequence_ids, self._sampler.sample(logits_RV, sequence_ids), strict=True))

    def _check(self, batch: Batch) -> None:
        if batch.pass_index != self._next_pass_index:
            raise InternalError(f"pass {batch.pass_index} came where pass {self._next_pass_index} was due")
        if not batch.chunks:
            raise InternalError(f"pass {batch.pass_index} has no chunks")
        for chunk in batch.chunks:
            problem = self._problem(chunk)
            if problem is not None:
                raise InternalError(f"pass {batch.pass_index}, sequence {chunk.sequence_id}: {problem}")

    def _problem(self, chunk: Chunk) -> str | None:
        if not chunk.token_ids or chunk.start < 0 or chunk.stop > self._config.max_model_len:
            return f"tokens [{chunk.start}, {chunk.stop}) are empty or outside [0, {self._config.max_model_len})"
        if not 0 <= min(chunk.token_ids) <= max(chunk.token_ids) < self._config.vocab_size:
            return f"a token is outside [0, {self._config.vocab_size})"
        if len(chunk.page_indices) < self._storage.layout.num_pages_for(chunk.stop):
            return f"{len(chunk.page_indices)} pages do not hold {chunk.stop} tokens"
        if not 0 <= min(chunk.page_indices) <= max(chunk.page_indices) < self._storage.num_pages:
            return f"a page is outside [0, {self._storage.num_pages})"
        if chunk.tail_slot is not None and not 0 <= chunk.tail_slot < len(self._storage.tails_IE):
            return f"tail slot {chunk.tail_slot} is outside [0, {len(self._storage.tails_IE)})"
        if chunk.samples and not self._sampler.knows(chunk.sequence_id):
            return "it samples, but was not announced"
        return None
