"""The port between the runner and a drafter that is a model: a draft model, an MTP module, an EAGLE head.

A drafter keeps a cache of its own over the same pages: in its layout, whole, on rank 0 alone. It follows the model:
after each pass its cache covers the tokens that the model's cache covers, so that it can be handed over with it. A
guess never changes an answer: it is kept only where the sampler, with the model's logits, draws the same token.

A head that reads hidden states pairs each token with the hidden state of the token before it. The pair of token j, for
j from 1, is at position j - 1 of its cache (as EAGLE and DeepSeek's MTP were trained: the first token has no pair). The
pair of a chunk's first token needs the hidden state of the chunk before: the head keeps it, or has it from the tail. A
forked sequence needs none for its first chunk: whoever computed its pages knew that token, and computed the pair.

Shape suffixes: T kept tokens of one chunk, E hidden dimension of the model, R rows, V vocabulary.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from pdserve.ids import SequenceId
from pdserve.model.decoder import OnLayer
from pdserve.schedule.batch import PageCopy


@dataclass(frozen=True, slots=True, kw_only=True)
class Followed:
    """A chunk as it turned out: without the drafts that were no good."""

    sequence_id: SequenceId
    start: int
    token_ids: tuple[int, ...]
    page_indices: tuple[int, ...]
    """Cover the tokens, and as many after them as the drafter may write."""
    hidden_TE: torch.Tensor | None
    """The model's hidden states of the tokens, after its final norm. None where the drafter does not read them."""
    sampled_token_id: int | None
    """The newest token of the sequence, which no cache has yet; None where the chunk does not sample."""
    carry_E: torch.Tensor | None
    """The hidden state of the token before `start`, from the tail, in the first chunk after a handoff; on the device of
    `hidden_TE`, and a copy."""


Propose = Callable[[torch.Tensor, Sequence[SequenceId], int], list[int]]
"""`propose(logits_RV, sequence_ids, num_ahead)`: for each row the token that the sampler would draw from these logits
`num_ahead` tokens after the newest one (1 for the next), with the sequence's parameters and noise. Its state
stays; `logits_RV`, float32 in host memory, is overwritten."""


class Drafter(Protocol):
    """Threads: the runner's."""

    @property
    def reads_hidden(self) -> bool:
        """Whether `Followed.hidden_TE` is wanted: the final norm of every token is computed for it."""
        ...

    def copy_pages(self, copies: Sequence[PageCopy]) -> None:
        """In the drafter's cache, in this order, before the pass. Requires: pages checked against the pool."""
        ...

    def follow(
        self, chunks: Sequence[Followed], on_layer: OnLayer, propose: Propose
    ) -> dict[SequenceId, tuple[int, ...]]:
        """Brings the cache up to the chunks, ticking each of its layers once by `on_layer(layer_index)`; then guesses
        what comes after the sampled token of each chunk that has one.

        Fewer guesses than asked for, or none, where the pages or the context end.
        Raises: `InternalError` for a chunk that does not follow what is in the cache.
        """
        ...

    def forget(self, sequence_ids: Iterable[SequenceId]) -> None:
        """Their next chunk starts at token 0, or brings a carry, or pages that were forked."""
        ...
