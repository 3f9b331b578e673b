"""Where the chunks of a pass lie in its rows: one row a token, one chunk after another."""

from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.schedule.batch import Chunk


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedChunk:
    chunk: Chunk
    first_row: int

    @property
    def last_row(self) -> int:
        return self.first_row + len(self.chunk.token_ids) - 1

    @property
    def num_known(self) -> int:
        """Tokens of the chunk that are no drafts."""
        return len(self.chunk.token_ids) - self.chunk.num_drafts

    def sampling_row(self, level: int) -> int:
        """The row that says what comes after the last known token and `level` drafts."""
        return self.first_row + self.num_known - 1 + level

    def draft(self, level: int) -> int:
        """The guess in the place of the token sampled at `level`."""
        return self.chunk.token_ids[self.num_known + level]

    @property
    def known_next_token_ids(self) -> tuple[int, ...]:
        """By row, from the first on: the known token that comes after it."""
        inside = self.chunk.token_ids[1 : self.num_known]
        return inside if self.chunk.next_token_id is None else (*inside, self.chunk.next_token_id)


def place_chunks(chunks: Sequence[Chunk]) -> list[PlacedChunk]:
    placed: list[PlacedChunk] = []
    first_row = 0
    for chunk in chunks:
        placed.append(PlacedChunk(chunk=chunk, first_row=first_row))
        first_row += len(chunk.token_ids)
    return placed


def sampling_levels(placed: Sequence[PlacedChunk]) -> list[list[PlacedChunk]]:
    """By level, from 0: the chunks in which a token may be sampled after so many drafts."""
    sampling = [each for each in placed if each.chunk.samples]
    num_levels = 1 + max((each.chunk.num_drafts for each in sampling), default=-1)
    return [[each for each in sampling if each.chunk.num_drafts >= level] for level in range(num_levels)]
