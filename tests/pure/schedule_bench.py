"""A scheduler and its pool, driven pass by pass by tests."""

from collections.abc import Mapping

from pdserve.config.speculation import Speculation
from pdserve.ids import SequenceId
from pdserve.kv.pages import PagePool
from pdserve.sampling import SamplingParams, TokenLogprobs
from pdserve.schedule.batch import Batch, BatchResult, Chunk
from pdserve.schedule.limits import ScheduleLimits
from pdserve.schedule.outcome import StepOutcome
from pdserve.schedule.scheduler import Scheduler
from pdserve.schedule.sequence import Sequence

PAGE_SLOTS = 4
LIMITS = ScheduleLimits(max_batch_tokens=32, saturation_tokens=16, max_running=8, max_waiting=4)


class Bench:
    """A scheduler, its pool, and an executor that samples token 9 after the drafts that are right."""

    def __init__(
        self, *, num_pages: int = 64, limits: ScheduleLimits = LIMITS, speculation: Speculation | None = None
    ) -> None:
        self.pool = PagePool(num_pages=num_pages)
        self.scheduler = Scheduler(pool=self.pool, page_slots=PAGE_SLOTS, limits=limits, speculation=speculation)

    def add(self, sequence: Sequence) -> Sequence:
        self.scheduler.add(sequence)
        return sequence

    def add_handed_over(self, sequence_id: int, *, num_tokens: int, num_pages: int, max_tokens: int = 8) -> Sequence:
        handed_over = sequence(sequence_id, num_tokens=num_tokens, max_tokens=max_tokens)
        handed_over.page_indices = self.pool.allocate(num_pages)
        handed_over.num_computed = num_tokens - 1
        return self.add(handed_over)

    def fork(self, sequence_id: int, parent: Sequence) -> Sequence:
        """Another choice of the parent's prompt."""
        assert parent.sampling is not None
        child = sequence(sequence_id, num_tokens=parent.num_prompt_tokens, max_tokens=parent.sampling.max_tokens)
        child.num_computed = child.num_prompt_tokens - 1
        self.scheduler.fork(child, page_indices=parent.page_indices)
        return child

    def end(self, sequence: Sequence) -> None:
        """Requires: it is not in the running batch."""
        assert self.scheduler.remove(sequence.sequence_id) is sequence
        self.pool.release(sequence.page_indices)

    def start(self, now_ns: int = 0) -> Batch:
        batch = self.scheduler.next_batch(now_ns)
        assert batch is not None
        return batch

    def finish(
        self, batch: Batch, *, num_right: int = 0, guesses: Mapping[int, tuple[int, ...]] | None = None
    ) -> StepOutcome:
        return self.scheduler.complete(result_of(batch, num_right=num_right, guesses=guesses))

    def step(self) -> tuple[Batch, StepOutcome]:
        batch = self.start()
        return batch, self.finish(batch)


def sequence(sequence_id: int, *, num_tokens: int, max_tokens: int | None = None) -> Sequence:
    return Sequence(
        sequence_id=SequenceId(sequence_id),
        token_ids=list(range(num_tokens)),
        num_prompt_tokens=num_tokens,
        arrival_ns=sequence_id,
        sampling=None if max_tokens is None else SamplingParams(max_tokens=max_tokens),
        tail_slot=5 if max_tokens is None else None,
    )


def result_of(batch: Batch, *, num_right: int = 0, guesses: Mapping[int, tuple[int, ...]] | None = None) -> BatchResult:
    """The first `num_right` drafts of each chunk were right, and the engine's drafter has these guesses."""
    return BatchResult(
        pass_index=batch.pass_index,
        sampled=tuple(
            (chunk.sequence_id, (*drafts_of(chunk)[:num_right], 9)) for chunk in batch.chunks if chunk.samples
        ),
        prompt_logprobs=tuple(
            (chunk.sequence_id, tuple(entry(token_id) for token_id in told_of(chunk)))
            for chunk in batch.chunks
            if chunk.num_prompt_logprobs is not None
        ),
        drafts=tuple((SequenceId(sequence_id), token_ids) for sequence_id, token_ids in (guesses or {}).items()),
        started_ns=0,
        ended_ns=1,
    )


def drafts_of(chunk: Chunk) -> tuple[int, ...]:
    return chunk.token_ids[len(chunk.token_ids) - chunk.num_drafts :]


def told_of(chunk: Chunk) -> tuple[int, ...]:
    """The tokens whose logprobs the chunk wants."""
    next_token_ids = () if chunk.next_token_id is None else (chunk.next_token_id,)
    return (*chunk.token_ids[1:], *next_token_ids)


def entry(token_id: int) -> TokenLogprobs:
    return TokenLogprobs(token_id=token_id, logprob=-1.0, top=())


def ranges(batch: Batch) -> list[tuple[int, int, int]]:
    return [(chunk.sequence_id, chunk.start, chunk.stop) for chunk in batch.chunks]
