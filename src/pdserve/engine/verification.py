"""Drafts against the sampler: it samples as if there were none, and goes on while it draws the very tokens guessed.

So a guess never changes an answer. Each level, the tokens after so many drafts, is one batched call of the sampler.

Shape suffixes: R rows (chunks of one level), V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from pdserve.engine.logprobs import token_logprobs
from pdserve.engine.pass_rows import PlacedChunk
from pdserve.engine.sampler import Sampler
from pdserve.ids import SequenceId
from pdserve.sampling import TokenLogprobs


@dataclass(slots=True, kw_only=True)
class Verified:
    """What was sampled in one chunk: the last token is new, those before it were drafts."""

    placed: PlacedChunk
    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[TokenLogprobs] = field(default_factory=list[TokenLogprobs])
    """Of the tokens, where the sequence asks for them."""

    @property
    def sequence_id(self) -> SequenceId:
        return self.placed.chunk.sequence_id

    @property
    def num_kept(self) -> int:
        """Tokens of the chunk that are right: the known ones, and the drafts that were sampled."""
        return self.placed.num_known + len(self.token_ids) - 1


def verify(levels: Sequence[Sequence[PlacedChunk]], logits_RV: torch.Tensor, sampler: Sampler) -> list[Verified]:
    """What was sampled in each chunk of the first level, in order. Overwrites the logits.

    Requires: a row for each chunk of each level, level after level.
    """
    verified = [Verified(placed=placed) for placed in levels[0]] if levels else []
    going, first_row = verified, 0
    for level, chunks in enumerate(levels):
        if level > 0:
            going = [each for each in going if _goes_on(each, level, sampler)]
        if not going:
            break
        rows = {placed.first_row: first_row + index for index, placed in enumerate(chunks)}
        is_whole = len(going) == len(chunks)
        picked = (
            slice(first_row, first_row + len(chunks)) if is_whole else [rows[each.placed.first_row] for each in going]
        )
        _sample_level(going, logits_RV[picked], sampler)
        first_row += len(chunks)
    return verified


def _goes_on(verified: Verified, level: int, sampler: Sampler) -> bool:
    placed = verified.placed
    return (
        placed.chunk.num_drafts >= level
        and verified.token_ids[-1] == placed.draft(level - 1)
        and not sampler.has_ended(placed.chunk.sequence_id)
    )


def _sample_level(going: Sequence[Verified], logits_RV: torch.Tensor, sampler: Sampler) -> None:
    """One token more of each, with its logprobs, which are those of the logits before the sampler changes them."""
    asked = [(row, sampler.num_top_logprobs(each.sequence_id)) for row, each in enumerate(going)]
    rows = [(row, num_top, logits_RV[row].log_softmax(dim=-1)) for row, num_top in asked if num_top is not None]
    token_ids = sampler.sample(logits_RV, [each.sequence_id for each in going])
    for each, token_id in zip(going, token_ids, strict=True):
        each.token_ids.append(token_id)
    for row, num_top, logprobs_V in rows:
        going[row].logprobs.append(token_logprobs(logprobs_V, token_ids[row], num_top=num_top))
