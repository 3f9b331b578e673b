"""A drafter that is a smaller model with the same tokenizer.

Token j is at position j of its cache, as it is of the model's. To guess what comes after the newest token it reads that
token too, which the model reads in its next pass; and then each of its own guesses but the last. Those that turn out
right are not read again.

Shape suffixes: T tokens of all chunks, R rows to guess from, E hidden, V vocabulary.
"""

from collections.abc import Iterable, Sequence

import torch

from pdserve.engine.drafter import Followed, Propose
from pdserve.engine.executor import Executor
from pdserve.engine.guessing import DraftPass, Reach, guess_ahead, no_tick
from pdserve.engine.kv_storage import KvStorage
from pdserve.ids import SequenceId
from pdserve.model.decoder import OnLayer
from pdserve.schedule.batch import Chunk, PageCopy


class DraftModel:
    """Implements `pdserve.engine.drafter.Drafter`."""

    reads_hidden = False

    def __init__(self, executor: Executor, storage: KvStorage, *, max_model_len: int, num_draft_tokens: int) -> None:
        """`max_model_len` is the smaller one of the two models': guesses end where either context does."""
        self._executor = executor
        self._storage = storage
        self._reach = Reach(
            num_draft_tokens=num_draft_tokens,
            max_model_len=max_model_len,
            page_slots=storage.layout.page_slots,
            lag=0,
        )
        self._num_read_ahead: dict[SequenceId, int] = {}
        """Tokens that the cache has beyond those of the model's: the newest one, and all guesses but the last."""

    def copy_pages(self, copies: Sequence[PageCopy]) -> None:
        self._storage.copy_pages(copies)

    def follow(
        self, chunks: Sequence[Followed], on_layer: OnLayer, propose: Propose
    ) -> dict[SequenceId, tuple[int, ...]]:
        draft_pass = DraftPass()
        for chunk in chunks:
            line = self._reach.line_of(chunk)
            draft_pass.add(self._unread(chunk, with_sampled=line is not None), line)
        if not draft_pass.chunks:
            for layer_index in range(self._storage.layout.num_layers):
                on_layer(layer_index)
            return {}
        x_TE = self._executor.forward(draft_pass.chunks, on_layer)
        if not draft_pass.lines:
            return {}
        logits_RV = self._logits(x_TE[draft_pass.rows])
        guesses = guess_ahead(draft_pass.lines, logits_RV, propose=propose, step=self._step)
        self._num_read_ahead |= {line.sequence_id: line.num_guesses for line in draft_pass.lines}
        return guesses

    def forget(self, sequence_ids: Iterable[SequenceId]) -> None:
        for sequence_id in sequence_ids:
            self._num_read_ahead.pop(sequence_id, None)

    def _unread(self, chunk: Followed, *, with_sampled: bool) -> Chunk | None:
        """What is still to be read of the chunk, in the context; None: nothing."""
        token_ids = chunk.token_ids[: max(0, self._reach.max_model_len - chunk.start)]
        if with_sampled and chunk.sampled_token_id is not None:
            token_ids += (chunk.sampled_token_id,)
        if not token_ids:
            return None
        # What is kept of a chunk is the newest token and right guesses. The last token is read for its logits.
        num_read = min(self._num_read_ahead.pop(chunk.sequence_id, 0), len(token_ids) - 1)
        return Chunk(
            sequence_id=chunk.sequence_id,
            start=chunk.start + num_read,
            token_ids=token_ids[num_read:],
            page_indices=chunk.page_indices,
            samples=False,
        )

    def _step(self, chunks: Sequence[Chunk], rows: Sequence[int]) -> torch.Tensor:
        """See `pdserve.engine.guessing.Step`."""
        del rows
        return self._logits(self._executor.forward(chunks, no_tick))

    def _logits(self, x_RE: torch.Tensor) -> torch.Tensor:
        return self._executor.logits(self._executor.final_norm(x_RE))
