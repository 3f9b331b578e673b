"""The scheduler driven by random events, with the books of pages, tokens and sequences kept a second time."""

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pdserve.errors import CapacityError
from pdserve.ids import PageIndex, SequenceId
from pdserve.kv.pages import PagePool
from pdserve.sampling import SamplingParams
from pdserve.schedule.batch import Batch, BatchResult, Chunk
from pdserve.schedule.limits import ScheduleLimits
from pdserve.schedule.outcome import StepOutcome
from pdserve.schedule.scheduler import Scheduler
from pdserve.schedule.sequence import Sequence
from pdserve.units import NS_PER_MS, NS_PER_S, div_ceil

PAGE_SLOTS = 4
NUM_PAGES = 12
LIMITS = ScheduleLimits(
    max_batch_tokens=9, saturation_tokens=5, max_running=4, max_waiting=6, ageing_tokens_per_s=1_000
)


@dataclass
class Expected:
    """What we know of a sequence without asking the scheduler."""

    sequence: Sequence
    num_written: int = 0
    """Tokens `[0, num_written)` have their KV in the pages that the sequence holds now."""
    token_ids: list[int] = field(default_factory=list[int])

    @property
    def generates(self) -> bool:
        return self.sequence.sampling is not None

    @property
    def num_remaining(self) -> int:
        return len(self.token_ids) - (not self.generates) - self.num_written

    @property
    def is_finished(self) -> bool:
        sampling = self.sequence.sampling
        return sampling is not None and len(self.token_ids) >= self.sequence.num_prompt_tokens + sampling.max_tokens


class ScheduleMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(num_pages=NUM_PAGES)
        self.scheduler = Scheduler(pool=self.pool, page_slots=PAGE_SLOTS, limits=LIMITS)
        self.now_ns = 0
        self.next_id = 0
        self.num_passes = 0
        self.inside: dict[SequenceId, Expected] = {}
        self.removing: set[SequenceId] = set()
        self.executor_knows: dict[SequenceId, list[int]] = {}
        self.batch: Batch | None = None
        self.outside: list[list[PageIndex]] = []
        """Pages of handoffs under way: held by prefilled sequences and grants, not by the scheduler."""

    @initialize(num_sequences=st.integers(0, 4))
    def begin(self, num_sequences: int) -> None:
        for index in range(num_sequences):
            self.add(num_prompt_tokens=5 * index + 1, max_tokens=3)

    def sequence(self, *, num_prompt_tokens: int, max_tokens: int | None) -> Sequence:
        self.next_id += 1
        return Sequence(
            sequence_id=SequenceId(self.next_id),
            token_ids=[self.next_id * 1_000 + position for position in range(num_prompt_tokens)],
            num_prompt_tokens=num_prompt_tokens,
            arrival_ns=self.now_ns,
            sampling=None if max_tokens is None else SamplingParams(max_tokens=max_tokens),
            tail_slot=7 if max_tokens is None else None,
        )

    def keep(self, sequence: Sequence) -> None:
        expected = Expected(sequence=sequence, num_written=sequence.num_computed, token_ids=list(sequence.token_ids))
        self.inside[sequence.sequence_id] = expected

    @rule(num_prompt_tokens=st.integers(1, 30), max_tokens=st.integers(1, 12))
    def add(self, num_prompt_tokens: int, max_tokens: int) -> None:
        self.add_fresh(self.sequence(num_prompt_tokens=num_prompt_tokens, max_tokens=max_tokens))

    @rule(num_prompt_tokens=st.integers(2, 45))
    def add_prefill_only(self, num_prompt_tokens: int) -> None:
        self.add_fresh(self.sequence(num_prompt_tokens=num_prompt_tokens, max_tokens=None))

    def add_fresh(self, sequence: Sequence) -> None:
        num_waiting = self.scheduler.num_waiting
        try:
            self.scheduler.add(sequence)
        except CapacityError:
            assert num_waiting >= LIMITS.max_waiting
        else:
            self.keep(sequence)

    @rule(num_prompt_tokens=st.integers(2, 20), max_tokens=st.integers(1, 8), handoff_ms=st.integers(0, 100))
    def add_handed_over(self, num_prompt_tokens: int, max_tokens: int, handoff_ms: int) -> None:
        """It arrived before its handoff began, so it may be older than what runs."""
        sequence = self.sequence(num_prompt_tokens=num_prompt_tokens, max_tokens=max_tokens)
        sequence.arrival_ns -= handoff_ms * NS_PER_MS
        num_pages = div_ceil(num_prompt_tokens - 1, PAGE_SLOTS)
        if num_pages <= self.pool.num_free:
            sequence.page_indices = self.pool.allocate(num_pages)
            sequence.num_computed = num_prompt_tokens - 1
            self.scheduler.add(sequence)
            self.keep(sequence)

    @rule(num_pages=st.integers(1, 4))
    def grant_pages(self, num_pages: int) -> None:
        if num_pages <= self.pool.num_free:
            self.outside.append(self.pool.allocate(num_pages))

    @precondition(lambda self: self.outside)
    @rule()
    def release_pages(self) -> None:
        self.pool.release(self.outside.pop(0))

    @rule(duration_ms=st.integers(1, 50))
    def wait(self, duration_ms: int) -> None:
        self.now_ns += duration_ms * NS_PER_MS

    @precondition(lambda self: self.inside)
    @rule(choice=st.integers(0, 50))
    def remove(self, choice: int) -> None:
        sequence_id = sorted(self.inside)[choice % len(self.inside)]
        self.remove_sequence(sequence_id)

    def remove_sequence(self, sequence_id: SequenceId) -> None:
        runs = self.batch is not None and any(chunk.sequence_id == sequence_id for chunk in self.batch.chunks)
        sequence = self.scheduler.remove(sequence_id)
        if runs:
            assert sequence is None
            self.removing.add(sequence_id)
        else:
            assert sequence is not None
            assert sequence is self.inside.pop(sequence_id).sequence
            self.pool.release(sequence.page_indices)

    @precondition(lambda self: self.batch is None)
    @rule()
    def start_pass(self) -> None:
        kept = {sequence_id: list(entry.sequence.page_indices) for sequence_id, entry in self.inside.items()}
        batch = self.scheduler.next_batch(self.now_ns)
        for sequence_id, entry in self.inside.items():
            if kept[sequence_id] and not entry.sequence.page_indices:
                assert entry.generates, "a prefill-only sequence was preempted"
                entry.num_written = 0
        if batch is None:
            return
        assert batch.pass_index == self.num_passes
        self.num_passes += 1
        self.batch = batch
        self.check_budget(batch)
        self.check_executor(batch)
        self.check_decodes_run(batch)
        for chunk in batch.chunks:
            self.check_chunk(chunk)

    def check_budget(self, batch: Batch) -> None:
        counts = [len(chunk.token_ids) for chunk in batch.chunks]
        assert 0 < sum(counts) <= LIMITS.max_batch_tokens
        assert len({chunk.sequence_id for chunk in batch.chunks}) == len(batch.chunks) <= LIMITS.max_running
        num_decodes = sum(self.decodes(self.inside[chunk.sequence_id]) for chunk in batch.chunks)
        if len(counts) - num_decodes > 1:
            first = num_decodes
            assert sum(counts) <= max(LIMITS.saturation_tokens, sum(counts[: first + 1]))

    def decodes(self, entry: Expected) -> bool:
        return entry.generates and entry.num_remaining == 1 and entry.num_written > 0

    def check_decodes_run(self, batch: Batch) -> None:
        """Decodes come first, and one is left out only when there is no slot or no page for it."""
        running = [chunk.sequence_id for chunk in batch.chunks]
        kinds = [self.decodes(self.inside[sequence_id]) for sequence_id in running]
        assert kinds == sorted(kinds, reverse=True)
        for sequence_id, entry in self.inside.items():
            if self.decodes(entry) and sequence_id not in running:
                holds_room = entry.num_written < len(entry.sequence.page_indices) * PAGE_SLOTS
                assert not holds_room or self.scheduler.num_running == LIMITS.max_running

    def check_executor(self, batch: Batch) -> None:
        for sequence_id in batch.ended_sequences:
            del self.executor_knows[sequence_id]
        for new in batch.new_sequences:
            assert new.sequence_id not in self.executor_knows
            assert new.sequence_id not in batch.ended_sequences
            entry = self.inside[new.sequence_id]
            assert [*new.prompt_token_ids, *new.output_token_ids] == entry.token_ids
            assert len(new.prompt_token_ids) == entry.sequence.num_prompt_tokens
            self.executor_knows[new.sequence_id] = list(entry.token_ids)
        for chunk in batch.chunks:
            if chunk.samples:
                assert self.executor_knows[chunk.sequence_id] == self.inside[chunk.sequence_id].token_ids

    def check_chunk(self, chunk: Chunk) -> None:
        entry = self.inside[chunk.sequence_id]
        sequence = entry.sequence
        assert chunk.start == entry.num_written
        assert list(chunk.token_ids) == entry.token_ids[chunk.start : chunk.stop]
        num_pages = div_ceil(chunk.stop, PAGE_SLOTS)
        assert list(chunk.page_indices) == sequence.page_indices[:num_pages]
        assert len(chunk.page_indices) == num_pages
        is_last = chunk.stop == len(entry.token_ids) - (not entry.generates)
        assert chunk.samples == (is_last and entry.generates)
        assert chunk.tail_slot == (7 if is_last and not entry.generates else None)

    @precondition(lambda self: self.batch is not None)
    @rule()
    def finish_pass(self) -> None:
        batch = self.batch
        assert batch is not None
        self.batch = None
        sampled = [(chunk.sequence_id, 100 + chunk.stop) for chunk in batch.chunks if chunk.samples]
        result = BatchResult(pass_index=batch.pass_index, sampled=tuple(sampled), started_ns=0, ended_ns=0)
        outcome = self.scheduler.complete(result)
        for chunk in batch.chunks:
            self.inside[chunk.sequence_id].num_written = chunk.stop
        for sequence_id, token in sampled:
            self.executor_knows[sequence_id].append(token)
            if sequence_id not in self.removing:
                self.inside[sequence_id].token_ids.append(token)
        self.check_outcome(batch, outcome)

    def check_outcome(self, batch: Batch, outcome: StepOutcome) -> None:
        assert {sequence.sequence_id for sequence in outcome.removed} == self.removing
        for sequence in outcome.removed:
            assert sequence.token_ids == self.inside.pop(sequence.sequence_id).token_ids
            self.pool.release(sequence.page_indices)
        sampled = [chunk.sequence_id for chunk in batch.chunks if chunk.samples]
        assert [sequence.sequence_id for sequence, _ in outcome.sampled] == [
            sequence_id for sequence_id in sampled if sequence_id not in self.removing
        ]
        self.removing.clear()
        done = {sequence_id for sequence_id, entry in self.inside.items() if entry.num_remaining == 0}
        assert {sequence.sequence_id for sequence in outcome.prefilled} == done
        for sequence in outcome.prefilled:
            self.inside.pop(sequence.sequence_id)
            self.outside.append(sequence.page_indices)
        for sequence, token in outcome.sampled:
            assert sequence.token_ids[-1] == token
            if self.inside[sequence.sequence_id].is_finished:
                self.remove_sequence(sequence.sequence_id)

    @invariant()
    def pages_are_conserved_and_have_one_owner(self) -> None:
        pages = [page for entry in self.inside.values() for page in entry.sequence.page_indices]
        pages += [page for granted in self.outside for page in granted]
        assert len(set(pages)) == len(pages)
        self.pool.audit(num_owned=len(pages))

    @invariant()
    def tokens_and_counts_agree(self) -> None:
        for entry in self.inside.values():
            assert entry.sequence.token_ids == entry.token_ids
            assert entry.sequence.num_computed == entry.num_written
            assert len(entry.sequence.page_indices) * PAGE_SLOTS >= entry.num_written
        assert self.scheduler.num_running + self.scheduler.num_waiting == len(self.inside)
        assert self.scheduler.num_running <= LIMITS.max_running

    def teardown(self) -> None:
        """Every sequence ends, once nobody adds more and pages outside come back."""
        max_passes = 60 + 200 * len(self.inside)
        for _ in range(max_passes):
            if self.batch is not None:
                self.finish_pass()
            if not self.inside:
                break
            self.now_ns += NS_PER_S
            self.start_pass()
            while self.outside:
                self.release_pages()
        assert not self.inside
        assert self.scheduler.num_waiting_tokens == 0
        self.pool.audit(num_owned=sum(map(len, self.outside)))


TestScheduleMachine = ScheduleMachine.TestCase
TestScheduleMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_schedule_machine_reaches_preemption_and_stall() -> None:
    """The random runs above mean little unless they get to the hard places: one fixed run that does."""
    machine = ScheduleMachine()
    for _ in range(3):
        machine.add_handed_over(num_prompt_tokens=13, max_tokens=8, handoff_ms=0)
    machine.grant_pages(num_pages=3)
    for _ in range(12):
        machine.start_pass()
        if machine.batch is not None:
            machine.finish_pass()
    assert machine.scheduler.num_preemptions > 0
    machine.teardown()


@pytest.mark.parametrize("max_tokens", [1, 12])
def test_schedule_machine_lone_sequence_ends(max_tokens: int) -> None:
    machine = ScheduleMachine()
    machine.add(num_prompt_tokens=30, max_tokens=max_tokens)
    machine.teardown()
