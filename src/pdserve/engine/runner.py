"""One forward pass over a batch: check it, copy pages, compute it; and on rank 0 sample, follow with the drafter, tick.

Every rank computes its part of all logits, so all make the same gathers, whatever the sampler then makes of them.

Shape suffixes: T tokens of all chunks; R rows that are needed after the last layer; E hidden; V vocabulary.
"""

import time
from collections.abc import Sequence

import torch

from pdserve.engine.executor import Executor
from pdserve.engine.kv_storage import KvStorage
from pdserve.engine.lead import Lead
from pdserve.engine.logprobs import token_logprobs
from pdserve.engine.pass_rows import PlacedChunk, place_chunks, sampling_levels
from pdserve.engine.verification import Verified
from pdserve.errors import InternalError
from pdserve.ids import SequenceId
from pdserve.model.config import ModelConfig
from pdserve.sampling import TokenLogprobs
from pdserve.schedule.batch import Batch, BatchResult, Chunk, PageCopy

_NUM_PROMPT_ROWS = 32
"""Prompt tokens whose logits are held at once: 16 MiB of a vocabulary of 128 K."""


class Runner:
    """Every rank runs the same batches, so that all call the same gathers. Threads: one at a time."""

    def __init__(self, *, config: ModelConfig, storage: KvStorage, executor: Executor, lead: Lead | None) -> None:
        self._config = config
        self._storage = storage
        self._executor = executor
        self._lead = lead
        self._next_pass_index = 0

    @torch.inference_mode()  # of it all: what an executor computes in this mode can be changed in it alone
    def run(self, batch: Batch) -> BatchResult:
        """Raises: `InternalError` for a batch that breaks the contract, before a byte of this rank's KV is written."""
        started_ns = time.monotonic_ns()
        if self._lead is not None:
            self._lead.announce(batch)
        self._check(batch)
        self._next_pass_index += 1
        self._copy_pages(batch.copies)
        x_TE = self._executor.forward(batch.chunks, self._on_layer)
        placed = place_chunks(batch.chunks)
        verified = self._sample(placed, x_TE)
        prompt_logprobs = self._prompt_logprobs(placed, x_TE)
        drafts = self._finish(placed, verified, x_TE)
        return BatchResult(
            pass_index=batch.pass_index,
            sampled=tuple((each.sequence_id, tuple(each.token_ids)) for each in verified),
            logprobs=tuple((each.sequence_id, tuple(each.logprobs)) for each in verified if each.logprobs),
            prompt_logprobs=prompt_logprobs,
            drafts=drafts,
            started_ns=started_ns,
            ended_ns=time.monotonic_ns(),
        )

    def _copy_pages(self, copies: Sequence[PageCopy]) -> None:
        self._storage.copy_pages(copies)
        if self._lead is not None:
            self._lead.copy_pages(copies)

    def _on_layer(self, layer_index: int) -> None:
        if self._lead is not None:
            self._lead.tick()

    def _sample(self, placed: Sequence[PlacedChunk], x_TE: torch.Tensor) -> list[Verified]:
        """One gather of all logits; nothing on the ranks that don't lead."""
        levels = sampling_levels(placed)
        rows = [each.sampling_row(level) for level, chunks in enumerate(levels) for each in chunks]
        if not rows:
            return []
        logits_RV = self._executor.logits(self._executor.final_norm(x_TE[rows]))
        if self._lead is None:
            return []
        return self._lead.sample(levels, logits_RV)

    def _prompt_logprobs(
        self, placed: Sequence[PlacedChunk], x_TE: torch.Tensor
    ) -> tuple[tuple[SequenceId, tuple[TokenLogprobs, ...]], ...]:
        """Of the known tokens after those of the chunks that ask for them."""
        told: list[tuple[SequenceId, tuple[TokenLogprobs, ...]]] = []
        for each in placed:
            num_top = each.chunk.num_prompt_logprobs
            if num_top is not None:
                entries = self._logprobs_of(each.known_next_token_ids, each.first_row, x_TE, num_top=num_top)
                told.append((each.chunk.sequence_id, tuple(entries)))
        return tuple(told)

    def _logprobs_of(
        self, token_ids: Sequence[int], first_row: int, x_TE: torch.Tensor, *, num_top: int
    ) -> list[TokenLogprobs]:
        """Of each token in the place after its row; nothing on the ranks that don't lead."""
        entries: list[TokenLogprobs] = []
        for start in range(0, len(token_ids), _NUM_PROMPT_ROWS):
            picked = token_ids[start : start + _NUM_PROMPT_ROWS]
            x_RE = x_TE[first_row + start : first_row + start + len(picked)]
            logits_RV = self._executor.logits(self._executor.final_norm(x_RE))
            if self._lead is not None:
                for logits_V, token_id in zip(logits_RV, picked, strict=True):
                    entries.append(token_logprobs(logits_V.log_softmax(dim=-1), token_id, num_top=num_top))
        return entries

    def _finish(
        self, placed: Sequence[PlacedChunk], verified: Sequence[Verified], x_TE: torch.Tensor
    ) -> tuple[tuple[SequenceId, tuple[int, ...]], ...]:
        """On rank 0: the tails, then the drafter's layers, then the last tick. The drafter's guesses."""
        if self._lead is None:
            return ()
        with_tail = [each for each in placed if each.chunk.tail_slot is not None]
        if with_tail:
            self._lead.write_tails(with_tail, self._executor.final_norm(x_TE[[each.last_row for each in with_tail]]))
        hidden_TE = self._executor.final_norm(x_TE) if self._lead.reads_hidden else None
        drafts = self._lead.follow(placed, verified, hidden_TE)
        self._lead.tick()
        return drafts

    def _check(self, batch: Batch) -> None:
        if batch.pass_index != self._next_pass_index:
            raise InternalError(f"pass {batch.pass_index} came where pass {self._next_pass_index} was due")
        if not batch.chunks:
            raise InternalError(f"pass {batch.pass_index} has no chunks")
        for copy in batch.copies:
            if not (0 <= copy.source < self._storage.num_pages and 0 <= copy.target < self._storage.num_pages):
                raise InternalError(f"pass {batch.pass_index}: {copy} is outside [0, {self._storage.num_pages})")
        for chunk in batch.chunks:
            problem = self._problem(chunk)
            if problem is None and self._lead is not None:
                problem = self._lead.problem(chunk)
            if problem is not None:
                raise InternalError(f"pass {batch.pass_index}, sequence {chunk.sequence_id}: {problem}")

    def _problem(self, chunk: Chunk) -> str | None:
        if not chunk.token_ids or chunk.start < 0 or chunk.stop > self._config.max_model_len:
            return f"tokens [{chunk.start}, {chunk.stop}) are empty or outside [0, {self._config.max_model_len})"
        next_token_ids = () if chunk.next_token_id is None else (chunk.next_token_id,)
        if any(not 0 <= token_id < self._config.vocab_size for token_id in (*chunk.token_ids, *next_token_ids)):
            return f"a token is outside [0, {self._config.vocab_size})"
        if len(chunk.page_indices) < self._storage.layout.num_pages_for(chunk.stop):
            return f"{len(chunk.page_indices)} pages do not hold {chunk.stop} tokens"
        if not 0 <= min(chunk.page_indices) <= max(chunk.page_indices) < self._storage.num_pages:
            return f"a page is outside [0, {self._storage.num_pages})"
        return _draft_problem(chunk)


def _draft_problem(chunk: Chunk) -> str | None:
    if not 0 <= chunk.num_drafts < len(chunk.token_ids):
        return f"{chunk.num_drafts} drafts leave none of {len(chunk.token_ids)} tokens to be known"
    if chunk.num_drafts > 0 and not chunk.samples:
        return f"it has {chunk.num_drafts} drafts, but does not sample"
    if chunk.num_drafts > 0 and chunk.tail_slot is not None:
        return "its last position is a draft, and no tail"
    if chunk.samples and chunk.next_token_id is not None:
        return "it samples where the next token is known"
    return None
