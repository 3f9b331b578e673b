"""One forward pass over a batch: check it, compute it; and on rank 0 tick, write tails, sample.

Shape suffixes: T tokens of all chunks; R rows that are needed after the last layer (tails and samples); E hidden;
V vocabulary.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from pdserve._kernels import CounterTicker
from pdserve.engine.executor import Executor
from pdserve.engine.kv_storage import KvStorage, LeadStorage
from pdserve.engine.logprobs import token_logprobs
from pdserve.engine.sampler import Sampler
from pdserve.errors import InternalError
from pdserve.ids import SequenceId
from pdserve.model.config import ModelConfig
from pdserve.sampling import TokenLogprobs
from pdserve.schedule.batch import Batch, BatchResult, Chunk


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sampled:
    """See `BatchResult`."""

    tokens: tuple[tuple[SequenceId, int], ...] = ()
    logprobs: tuple[tuple[SequenceId, TokenLogprobs], ...] = ()


class Lead:
    """What rank 0 does beside computing: it ticks, writes tails and samples."""

    def __init__(self, storage: LeadStorage, *, vocab_size: int, device: torch.device) -> None:
        self._device = device
        self._ticker = CounterTicker(np.frombuffer(storage.counter_region.buffer, dtype=np.uint8))
        self._tails_IE = storage.tails_IE
        self.sampler = Sampler(vocab_size=vocab_size)

    def tick(self) -> None:
        """Once what has been launched on the device is done, the gathers from the other ranks included.

        Cost: on CUDA the device has nothing to do from then until the next layer is launched. A captured graph can't
        wait so: it will have to write the counter itself.
        """
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        self._ticker.tick()

    def write_tail(self, tail_slot: int, normed_E: torch.Tensor) -> None:
        self._tails_IE[tail_slot] = normed_E

    def sample(self, logits_RV: torch.Tensor, sequence_ids: Sequence[SequenceId]) -> _Sampled:
        """One token a row, with its logprobs where the sequence asks for them. Overwrites `logits_RV`."""
        asked = [(row, self.sampler.num_top_logprobs(sequence_id)) for row, sequence_id in enumerate(sequence_ids)]
        rows = [(row, num_top, logits_RV[row].log_softmax(dim=-1)) for row, num_top in asked if num_top is not None]
        token_ids = self.sampler.sample(logits_RV, sequence_ids)
        return _Sampled(
            tokens=tuple(zip(sequence_ids, token_ids, strict=True)),
            logprobs=tuple(
                (sequence_ids[row], token_logprobs(logprobs_V, token_ids[row], num_top=num_top))
                for row, num_top, logprobs_V in rows
            ),
        )

    def problem(self, chunk: Chunk) -> str | None:
        if chunk.tail_slot is not None and not 0 <= chunk.tail_slot < len(self._tails_IE):
            return f"tail slot {chunk.tail_slot} is outside [0, {len(self._tails_IE)})"
        if chunk.samples and not self.sampler.knows(chunk.sequence_id):
            return "it samples, but was not announced"
        return None


class Runner:
    """Every rank runs the same batches, so that all call the same gathers. Threads: one at a time."""

    def __init__(self, *, config: ModelConfig, storage: KvStorage, executor: Executor, lead: Lead | None) -> None:
        self._config = config
        self._storage = storage
        self._executor = executor
        self._lead = lead
        self._next_pass_index = 0

    def run(self, batch: Batch) -> BatchResult:
        """Raises: `InternalError` for a batch that breaks the contract, before a byte of this rank's KV is written."""
        started_ns = time.monotonic_ns()
        if self._lead is not None:
            for new in batch.new_sequences:
                self._lead.sampler.add(new)
        self._check(batch)
        self._next_pass_index += 1
        x_TE = self._executor.forward(batch.chunks, self._on_layer)
        sampled = self._finish(batch.chunks, x_TE)
        if self._lead is not None:
            self._lead.tick()
            self._lead.sampler.forget(batch.ended_sequences)
        return BatchResult(
            pass_index=batch.pass_index,
            sampled=sampled.tokens,
            logprobs=sampled.logprobs,
            started_ns=started_ns,
            ended_ns=time.monotonic_ns(),
        )

    def _on_layer(self, layer_index: int) -> None:
        if self._lead is not None:
            self._lead.tick()

    def _finish(self, chunks: tuple[Chunk, ...], x_TE: torch.Tensor) -> _Sampled:
        """Writes the tails and samples: only the last rows of the chunks that ask for it pass the final norm."""
        needed: list[tuple[int, Chunk]] = []
        stop = 0
        for chunk in chunks:
            stop += len(chunk.token_ids)
            if chunk.samples or chunk.tail_slot is not None:
                needed.append((stop - 1, chunk))
        if not needed:
            return _Sampled()
        normed_RE = self._executor.final_norm(x_TE[[row for row, _ in needed]])
        if self._lead is not None:
            for row, (_, chunk) in enumerate(needed):
                if chunk.tail_slot is not None:
                    self._lead.write_tail(chunk.tail_slot, normed_RE[row])
        return self._sample(
            [(row, chunk.sequence_id) for row, (_, chunk) in enumerate(needed) if chunk.samples], normed_RE
        )

    def _sample(self, sampling: Sequence[tuple[int, SequenceId]], normed_RE: torch.Tensor) -> _Sampled:
        """Every rank computes its part of the logits; rank 0 samples."""
        if not sampling:
            return _Sampled()
        sequence_ids = [sequence_id for _, sequence_id in sampling]
        logits_RV = self._executor.logits(normed_RE[[row for row, _ in sampling]])
        return _Sampled() if self._lead is None else self._lead.sample(logits_RV, sequence_ids)

    def _check(self, batch: Batch) -> None:
        if batch.pass_index != self._next_pass_index:
            raise InternalError(f"pass {batch.pass_index} came where pass {self._next_pass_index} was due")
        if not batch.chunks:
            raise InternalError(f"pass {batch.pass_index} has no chunks")
        for chunk in batch.chunks:
            problem = self._problem(chunk)
            if problem is None and self._lead is not None:
                problem = self._lead.problem(chunk)
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
        return None
