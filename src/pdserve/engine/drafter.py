"""The port between the runner and a drafter that is a model: a draft model, an MTP module, an EAGLE head.

A drafter keeps a cache of its own over the same pages: in its layout, whole, on rank 0 alone. It follows the model:
after each pass its cache covers the tokens that the model's cache covers, so that it can be handed over with it. What it
guesses never changes an answer: a guess is kept only where the sampler, with the model's logits, draws the same token.

Shape suffixes: T kept tokens of one chunk, E hidden dimension of the model.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from pdserve.ids import SequenceId
from pdserve.model.decoder import OnLayer


@dataclass(frozen=True, slots=True, kw_only=True)
class Followed:
    """A chunk as it turned out: without the drafts that were no good."""

    sequence_id: SequenceId
    start: int
    token_ids: tuple[int, ...]
    page_indices: tuple[int, ...]
    """Cover the tokens, and as many after them as the drafter may write."""
    hidden_TE: torch.Tensor
    """The model's hidden states of the tokens, after its final norm."""
    sampled_token_id: int | None
    """The newest token of the sequence, which no cache has yet; None where the chunk does not sample."""
    carry_E: torch.Tensor | None
    """The hidden state of the token before `start`, from the tail, in the first chunk after a handoff."""


Propose = Callable[[torch.Tensor, Sequence[SequenceId], int], list[int]]
"""`propose(logits_RV, sequence_ids, num_ahead)`: for each row the token that the sampler would draw from these logits
`num_ahead` tokens after the newest one (1 for the next), with the sequence's parameters and noise. Its state stays."""


class Drafter(Protocol):
    """Threads: the runner's."""

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
        """Their next chunk starts at token 0, or brings a carry."""
        ...
