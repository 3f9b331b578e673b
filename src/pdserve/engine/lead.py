"""What rank 0 does beside computing: it ticks, writes tails, samples, and has the drafter follow.

Shape suffixes: T tokens of all chunks, R chosen rows of them, E hidden, V vocabulary.
"""

from collections.abc import Sequence

import numpy as np
import torch

from pdserve._kernels import CounterTicker
from pdserve.engine.drafter import Drafter, Followed
from pdserve.engine.kv_storage import LeadStorage
from pdserve.engine.pass_rows import PlacedChunk
from pdserve.engine.sampler import Sampler
from pdserve.engine.verification import Verified, verify
from pdserve.ids import SequenceId
from pdserve.schedule.batch import Batch, Chunk, PageCopy


class Lead:
    """Threads: the runner's."""

    def __init__(
        self, storage: LeadStorage, *, sampler: Sampler, device: torch.device, drafter: Drafter | None = None
    ) -> None:
        self._device = device
        self._ticker = CounterTicker(np.frombuffer(storage.counter_region.buffer, dtype=np.uint8))
        self._tails_IE = storage.tails_IE
        self._sampler = sampler
        self._drafter = drafter

    @property
    def reads_hidden(self) -> bool:
        """Whether `follow` wants the final norm of all rows."""
        return self._drafter is not None and self._drafter.reads_hidden

    def tick(self) -> None:
        """Once what has been launched on the device is done, the gathers from the other ranks included.

        Cost: on CUDA the device has nothing to do from then until the next layer is launched. A captured graph can't
        wait so: it will have to write the counter itself.
        """
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        self._ticker.tick()

    def announce(self, batch: Batch) -> None:
        """Before anything else of the batch: an id that ended may come again in the same batch."""
        self._sampler.forget(batch.ended_sequences)
        if self._drafter is not None:
            self._drafter.forget(batch.ended_sequences)
        for new in batch.new_sequences:
            self._sampler.add(new)

    def problem(self, chunk: Chunk) -> str | None:
        for name, slot in (("tail", chunk.tail_slot), ("carry", chunk.carry_slot)):
            if slot is not None and not 0 <= slot < len(self._tails_IE):
                return f"{name} slot {slot} is outside [0, {len(self._tails_IE)})"
        if chunk.samples and not self._sampler.knows(chunk.sequence_id):
            return "it samples, but was not announced"
        return None

    def copy_pages(self, copies: Sequence[PageCopy]) -> None:
        if self._drafter is not None and copies:
            self._drafter.copy_pages(copies)

    def sample(self, levels: Sequence[Sequence[PlacedChunk]], logits_RV: torch.Tensor) -> list[Verified]:
        """Overwrites the logits."""
        return verify(levels, logits_RV, self._sampler)

    def write_tails(self, placed: Sequence[PlacedChunk], normed_RE: torch.Tensor) -> None:
        """Requires: one row a chunk, of its last token; each has a tail slot."""
        for each, normed_E in zip(placed, normed_RE, strict=True):
            self._tails_IE[each.chunk.tail_slot] = normed_E

    def follow(
        self, placed: Sequence[PlacedChunk], verified: Sequence[Verified], hidden_TE: torch.Tensor | None
    ) -> tuple[tuple[SequenceId, tuple[int, ...]], ...]:
        """The drafter's guesses, after it has ticked each of its layers. Requires: `hidden_TE` where it is read."""
        if self._drafter is None:
            return ()
        outcomes = {each.placed.first_row: each for each in verified}
        followed = [self._followed(each, outcomes.get(each.first_row), hidden_TE) for each in placed]
        guesses = self._drafter.follow(followed, self._on_draft_layer, self._sampler.propose)
        return tuple(guesses.items())

    def _on_draft_layer(self, layer_index: int) -> None:
        self.tick()

    def _followed(self, placed: PlacedChunk, verified: Verified | None, hidden_TE: torch.Tensor | None) -> Followed:
        chunk, num_kept, sampled_token_id = placed.chunk, placed.num_known, None
        if verified is not None:
            num_kept = verified.num_kept
            if not self._sampler.has_ended(chunk.sequence_id):
                sampled_token_id = verified.token_ids[-1]
        return Followed(
            sequence_id=chunk.sequence_id,
            start=chunk.start,
            token_ids=chunk.token_ids[:num_kept],
            page_indices=chunk.page_indices,
            hidden_TE=None if hidden_TE is None else hidden_TE[placed.first_row : placed.first_row + num_kept],
            sampled_token_id=sampled_token_id,
            carry_E=None if chunk.carry_slot is None else self._tails_IE[chunk.carry_slot].to(self._device, copy=True),
        )
