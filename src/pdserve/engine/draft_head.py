"""A drafter that is a head on the model's hidden states: an MTP module or an EAGLE head.

The pair of token j (its embedding, and the model's hidden state of token j - 1) is at position j - 1 of the head's
cache. So a chunk `[start, stop)` brings the pairs of its own tokens, and of the sampled one; its first token's pair
needs the hidden state of token `start - 1`, the **carry**. It is kept from chunk to chunk; after a handoff it comes
from the tail. From the sampled token's pair comes the first guess; after that the head's own output stands in for
hidden states that the model has not computed yet.

Shape suffixes: T tokens of one chunk or of all, R rows to guess from, E hidden, V vocabulary.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from pdserve.engine.drafter import Followed, Propose
from pdserve.engine.guessing import Line, Reach, guess_ahead, no_tick
from pdserve.engine.kv_storage import KvStorage
from pdserve.engine.torch_executor import PagedCache
from pdserve.errors import InternalError
from pdserve.ids import SequenceId
from pdserve.model.decoder import OnLayer
from pdserve.model.draft_head import DraftHeadModule
from pdserve.schedule.batch import Chunk, PageCopy


@dataclass(frozen=True, slots=True, kw_only=True)
class _Carry:
    stop: int
    hidden_E: torch.Tensor
    """Of token `stop - 1`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pairs:
    chunk: Chunk
    """The second tokens of the pairs, where the pairs are in the head's cache."""
    previous_TE: torch.Tensor


class DraftHead:
    """Implements `pdserve.engine.drafter.Drafter`."""

    reads_hidden = True

    def __init__(
        self, module: DraftHeadModule, storage: KvStorage, *, max_model_len: int, num_draft_tokens: int
    ) -> None:
        """`max_model_len` is the smaller one of the model's and the head's: guesses end where either context does."""
        self._module = module
        self._storage = storage
        self._device = storage.pages_LPHKSD.device
        self._reach = Reach(
            num_draft_tokens=num_draft_tokens,
            max_model_len=max_model_len,
            page_slots=storage.layout.page_slots,
            lag=1,
        )
        self._carries: dict[SequenceId, _Carry] = {}

    def copy_pages(self, copies: Sequence[PageCopy]) -> None:
        self._storage.copy_pages(copies)

    @torch.inference_mode()
    def follow(
        self, chunks: Sequence[Followed], on_layer: OnLayer, propose: Propose
    ) -> dict[SequenceId, tuple[int, ...]]:
        pairs: list[_Pairs] = []
        lines: list[Line] = []
        rows: list[int] = []
        num_pairs = 0
        for chunk in chunks:
            line = self._reach.line_of(chunk)
            of_chunk = self._pairs(chunk, with_sampled=line is not None)
            if of_chunk is not None:
                pairs.append(of_chunk)
                num_pairs += len(of_chunk.chunk.token_ids)
            if line is not None:
                lines.append(line)
                rows.append(num_pairs - 1)
            self._keep_carry(chunk)
        if not pairs:
            for layer_index in range(self._storage.layout.num_layers):
                on_layer(layer_index)
            return {}
        states_TE = self._forward(
            [each.chunk for each in pairs], torch.cat([each.previous_TE for each in pairs]), on_layer
        )
        return self._guess(lines, states_TE[rows], propose) if lines else {}

    def forget(self, sequence_ids: Iterable[SequenceId]) -> None:
        for sequence_id in sequence_ids:
            self._carries.pop(sequence_id, None)

    def _pairs(self, chunk: Followed, *, with_sampled: bool) -> _Pairs | None:
        """Those of the chunk that are in the context; None: there are none."""
        token_ids = chunk.token_ids
        if with_sampled and chunk.sampled_token_id is not None:
            token_ids += (chunk.sampled_token_id,)
        if chunk.start == 0:
            token_ids, previous_TE, start = token_ids[1:], _hidden_of(chunk), 0
        else:
            previous_TE, start = torch.cat([self._carry_of(chunk)[None], _hidden_of(chunk)]), chunk.start - 1
        token_ids = token_ids[: max(0, self._reach.max_model_len - start)]
        if not token_ids:
            return None
        pairs = Chunk(
            sequence_id=chunk.sequence_id,
            start=start,
            token_ids=token_ids,
            page_indices=chunk.page_indices,
            samples=False,
        )
        return _Pairs(chunk=pairs, previous_TE=previous_TE[: len(token_ids)])

    def _carry_of(self, chunk: Followed) -> torch.Tensor:
        if chunk.carry_E is not None:
            return chunk.carry_E
        carry = self._carries.get(chunk.sequence_id)
        if carry is None or carry.stop != chunk.start:
            raise InternalError(
                f"sequence {chunk.sequence_id} came to the draft head at token {chunk.start} without the hidden state "
                "of the token before"
            )
        return carry.hidden_E

    def _keep_carry(self, chunk: Followed) -> None:
        # A copy of the row: a view would keep the hidden states of the whole pass.
        self._carries[chunk.sequence_id] = _Carry(
            stop=chunk.start + len(chunk.token_ids), hidden_E=_hidden_of(chunk)[-1].clone()
        )

    def _guess(
        self, lines: Sequence[Line], states_RE: torch.Tensor, propose: Propose
    ) -> dict[SequenceId, tuple[int, ...]]:
        def step(chunks: Sequence[Chunk], rows: Sequence[int]) -> torch.Tensor:
            nonlocal states_RE
            states_RE = self._forward(chunks, states_RE[list(rows)], no_tick)
            return self._logits(states_RE)

        return guess_ahead(lines, self._logits(states_RE), propose=propose, step=step)

    def _forward(self, chunks: Sequence[Chunk], previous_TE: torch.Tensor, on_layer: OnLayer) -> torch.Tensor:
        token_ids_T = torch.tensor([token_id for chunk in chunks for token_id in chunk.token_ids])
        positions_T = torch.cat([torch.arange(chunk.start, chunk.stop) for chunk in chunks])
        cache = PagedCache(chunks, self._storage)
        return self._module.forward(
            token_ids_T.to(self._device), previous_TE, positions_T.to(self._device), cache, on_layer
        )

    def _logits(self, states_RE: torch.Tensor) -> torch.Tensor:
        return self._module.logits(states_RE).float().cpu()


def _hidden_of(chunk: Followed) -> torch.Tensor:
    if chunk.hidden_TE is None:
        raise InternalError(f"sequence {chunk.sequence_id} came to the draft head without hidden states")
    return chunk.hidden_TE
