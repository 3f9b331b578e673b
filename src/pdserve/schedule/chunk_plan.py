"""A chunk in the making: tokens are settled first, then drafts and the pages to look ahead in, where there is room."""

from dataclasses import dataclass

from pdserve.schedule.batch import Chunk
from pdserve.schedule.sequence import Sequence
from pdserve.units import div_ceil


@dataclass(slots=True, kw_only=True)
class ChunkPlan:
    sequence: Sequence
    num_tokens: int
    """Known tokens from `sequence.num_computed` on."""
    draft_token_ids: tuple[int, ...] = ()
    num_lookahead_slots: int = 0
    """After the chunk, as far as the sequence has pages."""

    @property
    def known_stop(self) -> int:
        return self.sequence.num_computed + self.num_tokens

    @property
    def stop(self) -> int:
        return self.known_stop + len(self.draft_token_ids)

    @property
    def samples(self) -> bool:
        sequence = self.sequence
        return sequence.sampling is not None and sequence.num_computed + self.num_tokens == len(sequence.token_ids)

    def chunk(self, *, page_slots: int) -> Chunk:
        sequence, num_drafts = self.sequence, len(self.draft_token_ids)
        start, prompt_stop = sequence.num_computed, sequence.num_prompt_tokens
        known_stop = start + self.num_tokens
        num_pages = div_ceil(known_stop + num_drafts + self.num_lookahead_slots, page_slots)
        num_prompt_logprobs = None
        if sequence.sampling is not None and start + 1 < prompt_stop:
            num_prompt_logprobs = sequence.sampling.num_prompt_logprobs
        wants_next = num_prompt_logprobs is not None and known_stop < prompt_stop
        is_whole = known_stop == sequence.compute_stop
        return Chunk(
            sequence_id=sequence.sequence_id,
            start=start,
            token_ids=(*sequence.token_ids[start:known_stop], *self.draft_token_ids),
            page_indices=tuple(sequence.page_indices[:num_pages]),
            samples=is_whole and sequence.sampling is not None,
            num_drafts=num_drafts,
            tail_slot=sequence.tail_slot if is_whole and sequence.sampling is None else None,
            carry_slot=sequence.carry_slot,
            num_prompt_logprobs=num_prompt_logprobs,
            next_token_id=sequence.token_ids[known_stop] if wants_next else None,
        )
