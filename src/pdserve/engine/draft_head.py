"""A drafter that is a head on the model's hidden states: an MTP module or an EAGLE head.

The pair of token j (its embedding, and the model's hidden state of token j - 1) is at position j - 1 of the head's
cache. So a chunk `[start, stop)` brings the pairs of its own tokens, and of the sampled one; its first token's pair
needs the hidden state of token `start - 1`, the **carry**. It is kept from chunk to chunk; after a handoff it comes
from the tail. A sequence that was forked begins without one: its pages have that pair already.

From the sampled token's pair comes the first guess; after that the head's own output stands in for hidden states that
the model has not computed yet.

Shape suffixes: T tokens of one chunk or of all, R rows to guess from, E hidden, V vocabulary.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from pdserve.engine.drafter import Followed, Propose
from pdserve.engine.guessing import DraftPass, Line, Reach, guess_ahead, no_tick
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
        draft_pass = DraftPass()
        previous: list[torch.Tensor] = []
        for chunk in chunks:
            line = self._reach.line_of(chunk)
            pairs = self._pairs(chunk, with_sampled=line is not None)
            draft_pass.add(None if pairs is None else pairs.chunk, line)
            if pairs is not None:
                previous.append(pairs.previous_TE)
            self._keep_carry(chunk)
        if not draft_pass.chunks:
            for layer_index in range(self._storage.layout.num_layers):
                on_layer(layer_index)
            return {}
        states_TE = self._forward(draft_pass.chunks, torch.cat(previous), on_layer)
        return self._guess(draft_pass.lines, states_TE[draft_pass.rows], propose) if draft_pass.lines else {}

    def forget(self, sequence_ids: Iterable[SequenceId]) -> None:
        for sequence_id in sequence_ids:
            self._carries.pop(sequence_id, None)

    def _pairs(self, chunk: Followed, *, with_sampled: bool) -> _Pairs | None:
        """Those of the chunk that are in the context; None: there are none."""
        token_ids = chunk.token_ids
        if with_sampled and chunk.sampled_token_id is not None:
            token_ids += (chunk.sampled_token_id,)
        carry_E, previous_TE = self._carry_of(chunk), _hidden_of(chunk)
        if carry_E is None:
            token_ids, start = token_ids[1:], chunk.start
        else:
            previous_TE, start = torch.cat([carry_E[None], previous_TE]), chunk.start - 1
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

    def _carry_of(self, chunk: Followed) -> torch.Tensor | None:
        """None where the first token's pair is not to be computed: there is none, or another sequence has done so."""
        if chunk.start == 0 or chunk.carry_E is not None:
            return chunk.carry_E
        carry = self._carries.get(chunk.sequence_id)
        if carry is None:
            return None
        if carry.stop != chunk.start:
            raise InternalError(
                f"sequence {chunk.sequence_id} came to the draft head at token {chunk.start}, where token {carry.stop} "
                "was due"
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
