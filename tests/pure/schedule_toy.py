"""An engine whose KV can be read: each slot holds the tokens that its token saw, and the next token follows from them.

So a chunk that reads a page of another sequence, a stale draft, or a page that was granted and overwritten is found
at once, and the tokens of a sequence are known beforehand, whatever the scheduler does.
"""

from collections.abc import Callable, Iterable

from tests.pure.schedule_bench import drafts_of, entry, told_of

from pdserve.ids import SequenceId
from pdserve.schedule.batch import Batch, BatchResult, Chunk

FOREIGN = (-1,)
"""What a remote peer writes."""

Guess = Callable[[tuple[int, ...]], tuple[int, ...]]
"""From the known tokens, what an engine's drafter thinks comes after them."""


def next_token(token_ids: tuple[int, ...]) -> int:
    """Repeats itself enough for n-grams to be right at times."""
    return (token_ids[-1] + len(token_ids) // 6) % 4


def continuation(token_ids: tuple[int, ...], *, num_tokens: int) -> tuple[int, ...]:
    for _ in range(num_tokens):
        token_ids = (*token_ids, next_token(token_ids))
    return token_ids[len(token_ids) - num_tokens :]


class ToyEngine:
    def __init__(self, *, page_slots: int) -> None:
        self._page_slots = page_slots
        self._slots: dict[tuple[int, int], tuple[int, ...]] = {}
        self.met: set[SequenceId] = set()
        """Sequences that it has computed something of, and not been told to forget."""
        self._sampling: dict[SequenceId, tuple[int, ...]] = {}
        """Tokens of the announced sequences."""

    def land(self, page_indices: Iterable[int], token_ids: tuple[int, ...]) -> None:
        """A handoff of these tokens into these pages."""
        self._write(tuple(page_indices), start=0, token_ids=token_ids)

    def overwrite(self, page_indices: Iterable[int]) -> None:
        """A remote peer does, as long as the pages are granted to it."""
        for page_index in page_indices:
            for slot in range(self._page_slots):
                self._slots[page_index, slot] = FOREIGN

    def is_overwritten(self, page_index: int) -> bool:
        return all(self._slots[page_index, slot] == FOREIGN for slot in range(self._page_slots))

    def run(self, batch: Batch, guess: Guess | None) -> BatchResult:
        for sequence_id in batch.ended_sequences:
            self.met.remove(sequence_id)
            self._sampling.pop(sequence_id, None)
        for new in batch.new_sequences:
            assert new.sequence_id not in self._sampling
            self._sampling[new.sequence_id] = (*new.prompt_token_ids, *new.output_token_ids)
        for copy in batch.copies:
            for slot in range(self._page_slots):
                self._slots[copy.target, slot] = self._slots.get((copy.source, slot), FOREIGN)
        sampled = [(chunk.sequence_id, self._compute(chunk)) for chunk in batch.chunks]
        self.met.update(chunk.sequence_id for chunk in batch.chunks)
        sampled = [(sequence_id, token_ids) for sequence_id, token_ids in sampled if token_ids]
        drafts = [(sequence_id, guess(self._sampling[sequence_id])) for sequence_id, _ in sampled] if guess else []
        return BatchResult(
            pass_index=batch.pass_index,
            sampled=tuple(sampled),
            prompt_logprobs=tuple(
                (chunk.sequence_id, tuple(map(entry, told_of(chunk))))
                for chunk in batch.chunks
                if chunk.num_prompt_logprobs is not None
            ),
            drafts=tuple(drafts),
            started_ns=0,
            ended_ns=0,
        )

    def _compute(self, chunk: Chunk) -> tuple[int, ...]:
        assert chunk.start > 0 or chunk.sequence_id not in self.met, "it began again before it ended"
        known = (*self._read(chunk), *chunk.token_ids[: len(chunk.token_ids) - chunk.num_drafts])
        self._write(chunk.page_indices, start=chunk.start, token_ids=(*known, *drafts_of(chunk)))
        if not chunk.samples:
            return ()
        assert self._sampling[chunk.sequence_id] == known
        sampled: list[int] = []
        for draft in (*drafts_of(chunk), None):
            sampled.append(next_token((*known, *sampled)))
            if sampled[-1] != draft:
                break
        self._sampling[chunk.sequence_id] = (*known, *sampled)
        return tuple(sampled)

    def _read(self, chunk: Chunk) -> tuple[int, ...]:
        """The tokens before the chunk, which must all have seen each other."""
        read: tuple[int, ...] = ()
        for position in range(chunk.start):
            seen = self._slots[self._place(chunk.page_indices, position)]
            assert seen[:-1] == read, f"sequence {chunk.sequence_id} reads {seen} at {position}"
            read = seen
        return read

    def _write(self, page_indices: tuple[int, ...], *, start: int, token_ids: tuple[int, ...]) -> None:
        for position in range(start, len(token_ids)):
            self._slots[self._place(page_indices, position)] = token_ids[: position + 1]

    def _place(self, page_indices: tuple[int, ...], position: int) -> tuple[int, int]:
        return page_indices[position // self._page_slots], position % self._page_slots
