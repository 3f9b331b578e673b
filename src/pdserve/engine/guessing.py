"""Guesses of several sequences, one token after another, each sequence as far as its pages and the context let it.

Shape suffixes: R rows, one a sequence; V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count

import torch

from pdserve.engine.drafter import Followed, Propose
from pdserve.ids import SequenceId
from pdserve.schedule.batch import Chunk


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A sequence that is guessed ahead."""

    sequence_id: SequenceId
    page_indices: tuple[int, ...]
    first_position: int
    """Of the first guess, in the drafter's cache."""
    num_guesses: int
    """At least 1."""

    def chunk_of(self, token_id: int, *, num_ahead: int) -> Chunk:
        """The guess that is `num_ahead` tokens after the newest one, as a pass of the drafter takes it."""
        return Chunk(
            sequence_id=self.sequence_id,
            start=self.first_position + num_ahead - 1,
            token_ids=(token_id,),
            page_indices=self.page_indices,
            samples=False,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """How far a drafter guesses."""

    num_draft_tokens: int
    max_model_len: int
    """The smaller one of the model's and the drafter's: guesses end where either context does."""
    page_slots: int
    lag: int
    """How many places before its position in the model's cache a token is in the drafter's."""

    def line_of(self, chunk: Followed) -> Line | None:
        """As many guesses as have a place in the context, where the token before each has one in the pages."""
        if chunk.sampled_token_id is None:
            return None
        stop = chunk.start + len(chunk.token_ids)
        num_slots = len(chunk.page_indices) * self.page_slots
        num_guesses = min(self.num_draft_tokens, num_slots + self.lag - stop, self.max_model_len - 1 - stop)
        if num_guesses <= 0:
            return None
        return Line(
            sequence_id=chunk.sequence_id,
            page_indices=chunk.page_indices,
            first_position=stop + 1 - self.lag,
            num_guesses=num_guesses,
        )


@dataclass(slots=True)
class DraftPass:
    """What a drafter reads to follow the model, and from which of its rows it guesses then."""

    chunks: list[Chunk] = field(default_factory=list[Chunk])
    lines: list[Line] = field(default_factory=list[Line])
    rows: list[int] = field(default_factory=list[int])
    """Of the lines: the last ones of their chunks."""
    _num_tokens: int = 0

    def add(self, chunk: Chunk | None, line: Line | None) -> None:
        """Requires: a chunk, where there is a line."""
        if chunk is not None:
            self.chunks.append(chunk)
            self._num_tokens += len(chunk.token_ids)
        if line is not None:
            self.lines.append(line)
            self.rows.append(self._num_tokens - 1)


Step = Callable[[Sequence[Chunk], Sequence[int]], torch.Tensor]
"""`step(chunks, rows)`: logits_RV after one more token of each sequence that goes on; `rows` are the rows that these
sequences had in the logits before."""


def guess_ahead(
    lines: Sequence[Line], logits_RV: torch.Tensor, *, propose: Propose, step: Step
) -> dict[SequenceId, tuple[int, ...]]:
    """All guesses, from the logits after the newest token of each sequence; at least one sequence."""
    guesses: dict[SequenceId, tuple[int, ...]] = {line.sequence_id: () for line in lines}
    for num_ahead in count(1):
        token_ids = propose(logits_RV, [line.sequence_id for line in lines], num_ahead)
        for line, token_id in zip(lines, token_ids, strict=True):
            guesses[line.sequence_id] += (token_id,)
        rows = [row for row, line in enumerate(lines) if line.num_guesses > num_ahead]
        if not rows:
            break
        logits_RV = step([lines[row].chunk_of(token_ids[row], num_ahead=num_ahead) for row in rows], rows)
        lines = [lines[row] for row in rows]
    return guesses


def no_tick(layer_index: int) -> None:
    """`on_layer` of a guess: it is not handed over."""
