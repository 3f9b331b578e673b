"""The scheduler driven by random events, with the books of pages, tokens and sequences kept a second time.

What it computes is computed by an engine whose KV can be read (`schedule_toy`).
"""

from collections import Counter
from random import Random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.pure.schedule_books import CountedPool, Expected
from tests.pure.schedule_toy import ToyEngine, continuation

from pdserve.config.speculation import Drafter, Speculation
from pdserve.errors import CapacityError
from pdserve.ids import PageIndex, SequenceId
from pdserve.sampling import SamplingParams
from pdserve.schedule.batch import Batch, Chunk
from pdserve.schedule.limits import ScheduleLimits
from pdserve.schedule.outcome import StepOutcome
from pdserve.schedule.scheduler import Scheduler
from pdserve.schedule.sequence import Sequence
from pdserve.units import NS_PER_MS, NS_PER_S, div_ceil

PAGE_SLOTS = 4
NUM_PAGES = 12
LIMITS = ScheduleLimits(
    max_batch_tokens=9, saturation_tokens=6, max_running=4, max_waiting=6, ageing_tokens_per_s=1_000
)
SPECULATIONS = (
    None,
    Speculation(drafter=Drafter.NGRAM, num_draft_tokens=3),
    Speculation(drafter=Drafter.MTP, num_draft_tokens=3),
)


class ScheduleMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = CountedPool(num_pages=NUM_PAGES)
        self.engine = ToyEngine(page_slots=PAGE_SLOTS)
        self.random = Random(0)
        self.speculate(None)
        self.now_ns = 0
        self.next_id = 0
        self.num_passes = 0
        self.inside: dict[SequenceId, Expected] = {}
        self.removing: set[SequenceId] = set()
        self.batch: Batch | None = None
        self.sources: dict[SequenceId, PageIndex] = {}
        """Pages that are still to be copied for these sequences."""
        self.copying: list[PageIndex] = []
        """Pages that the running batch copies."""
        self.outside: list[list[PageIndex]] = []
        """Pages of handoffs under way: held by prefilled sequences and grants, not by the scheduler."""

    def speculate(self, speculation: Speculation | None) -> None:
        self.speculation = speculation
        self.scheduler = Scheduler(pool=self.pool, page_slots=PAGE_SLOTS, limits=LIMITS, speculation=speculation)

    @initialize(
        speculation=st.sampled_from(SPECULATIONS), num_sequences=st.integers(0, 4), seed=st.integers(0, 2**32 - 1)
    )
    def begin(self, speculation: Speculation | None, num_sequences: int, seed: int) -> None:
        self.speculate(speculation)
        self.random.seed(seed)
        for index in range(num_sequences):
            self.add(num_prompt_tokens=5 * index + 1, max_tokens=3)

    def sequence(self, *, num_prompt_tokens: int, max_tokens: int | None) -> Sequence:
        self.next_id += 1
        return Sequence(
            sequence_id=SequenceId(self.next_id),
            token_ids=[self.next_id * 4, *(position // 2 % 4 for position in range(1, num_prompt_tokens))],
            num_prompt_tokens=num_prompt_tokens,
            arrival_ns=self.now_ns,
            sampling=None if max_tokens is None else SamplingParams(max_tokens=max_tokens),
            tail_slot=7 if max_tokens is None else None,
        )

    def handed_over(self, *, num_prompt_tokens: int, max_tokens: int, handoff_ms: int) -> Sequence:
        """It arrived before its handoff began, so it may be older than what runs. Without pages yet."""
        sequence = self.sequence(num_prompt_tokens=num_prompt_tokens, max_tokens=max_tokens)
        sequence.arrival_ns -= handoff_ms * NS_PER_MS
        sequence.num_computed = num_prompt_tokens - 1
        sequence.carry_slot = 3
        return sequence

    def keep(self, sequence: Sequence) -> None:
        expected = Expected(sequence=sequence, num_written=sequence.num_computed, token_ids=list(sequence.token_ids))
        self.inside[sequence.sequence_id] = expected

    @rule(num_prompt_tokens=st.integers(1, 30), max_tokens=st.integers(1, 12))
    def add(self, num_prompt_tokens: int, max_tokens: int) -> None:
        self.add_fresh(self.sequence(num_prompt_tokens=num_prompt_tokens, max_tokens=max_tokens))

    @rule(num_prompt_tokens=st.integers(1, 30), max_tokens=st.integers(1, 12))
    def add_asking_for_prompt_logprobs(self, num_prompt_tokens: int, max_tokens: int) -> None:
        sequence = self.sequence(num_prompt_tokens=num_prompt_tokens, max_tokens=max_tokens)
        sequence.sampling = SamplingParams(max_tokens=max_tokens, num_prompt_logprobs=0)
        self.add_fresh(sequence)

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
        sequence = self.handed_over(num_prompt_tokens=num_prompt_tokens, max_tokens=max_tokens, handoff_ms=handoff_ms)
        page_indices = self.land(sequence)
        if page_indices:
            sequence.page_indices = page_indices
            self.scheduler.add(sequence)
            self.keep(sequence)

    def land(self, sequence: Sequence) -> list[PageIndex]:
        """The pages of its computed tokens; none when they are short."""
        num_pages = div_ceil(sequence.num_computed, PAGE_SLOTS)
        if num_pages > self.pool.num_free:
            return []
        page_indices = self.pool.allocate(num_pages)
        self.engine.land(page_indices, tuple(sequence.token_ids[: sequence.num_computed]))
        return page_indices

    @rule(num_prompt_tokens=st.integers(2, 14), max_tokens=st.integers(1, 8), num_choices=st.integers(1, 3))
    def fork_landed(self, num_prompt_tokens: int, max_tokens: int, num_choices: int) -> None:
        first = self.handed_over(num_prompt_tokens=num_prompt_tokens, max_tokens=max_tokens, handoff_ms=20)
        page_indices = self.land(first)
        if page_indices:
            for _ in range(num_choices):
                self.fork(first, page_indices)
            self.pool.release(page_indices)

    @precondition(lambda self: self.forkable())
    @rule(choice=st.integers(0, 50))
    def fork_running(self, choice: int) -> None:
        forkable = self.forkable()
        parent = forkable[choice % len(forkable)]
        self.fork(parent, parent.page_indices)

    def forkable(self) -> list[Sequence]:
        """With all prompt tokens but the last in their pages."""
        return [
            entry.sequence
            for sequence_id, entry in sorted(self.inside.items())
            if entry.generates
            and sequence_id not in self.sources
            and entry.num_written >= entry.sequence.num_prompt_tokens - 1 > 0
        ]

    def fork(self, parent: Sequence, page_indices: list[PageIndex]) -> None:
        assert parent.sampling is not None
        num_computed = parent.num_prompt_tokens - 1
        child = self.handed_over(
            num_prompt_tokens=parent.num_prompt_tokens, max_tokens=parent.sampling.max_tokens, handoff_ms=0
        )
        child.token_ids = parent.token_ids[: parent.num_prompt_tokens]
        needs_copy = num_computed % PAGE_SLOTS > 0
        has_room = self.pool.num_free > 0 or not needs_copy
        self.scheduler.fork(child, page_indices=page_indices)
        assert child.num_computed == (num_computed if has_room else 0)
        assert child.carry_slot == (3 if has_room else None)
        if has_room and needs_copy:
            self.sources[child.sequence_id] = page_indices[num_computed // PAGE_SLOTS]
        self.keep(child)

    @rule(num_pages=st.integers(1, 4))
    def grant_pages(self, num_pages: int) -> None:
        if num_pages <= self.pool.num_free:
            granted = self.pool.allocate(num_pages)
            self.engine.overwrite(granted)
            self.outside.append(granted)

    @precondition(lambda self: self.outside)
    @rule()
    def release_pages(self) -> None:
        granted = self.outside.pop(0)
        assert all(map(self.engine.is_overwritten, granted)), "the engine wrote into pages that others own"
        self.pool.release(granted)

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
            self.sources.pop(sequence_id, None)
            self.pool.release(sequence.page_indices)

    @precondition(lambda self: self.batch is None)
    @rule()
    def start_pass(self) -> None:
        batch = self.scheduler.next_batch(self.now_ns)
        for sequence_id, entry in self.inside.items():
            if entry.num_written > 0 and entry.sequence.num_computed == 0:
                assert entry.generates, "a prefill-only sequence was preempted"
                entry.num_written = 0
                self.sources.pop(sequence_id, None)
        if batch is None:
            return
        assert batch.pass_index == self.num_passes
        self.num_passes += 1
        self.batch = batch
        self.copying = [
            self.sources.pop(chunk.sequence_id) for chunk in batch.chunks if chunk.sequence_id in self.sources
        ]
        assert [copy.source for copy in batch.copies] == self.copying
        assert set(batch.ended_sequences) <= self.engine.met
        assert self.engine.met - set(batch.ended_sequences) <= self.inside.keys()
        self.check_budget(batch)
        self.check_decodes_run(batch)
        num_drafts = sum(chunk.num_drafts for chunk in batch.chunks)
        assert num_drafts == 0 or sum(len(chunk.token_ids) for chunk in batch.chunks) <= LIMITS.saturation_tokens
        for chunk in batch.chunks:
            self.check_chunk(chunk)

    def check_budget(self, batch: Batch) -> None:
        counts = [len(chunk.token_ids) - chunk.num_drafts for chunk in batch.chunks]
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

    def check_chunk(self, chunk: Chunk) -> None:
        entry = self.inside[chunk.sequence_id]
        sequence = entry.sequence
        known_stop = chunk.stop - chunk.num_drafts
        assert chunk.start == entry.num_written
        assert list(chunk.token_ids[: known_stop - chunk.start]) == entry.token_ids[chunk.start : known_stop]
        num_pages = len(chunk.page_indices)
        assert list(chunk.page_indices) == sequence.page_indices[:num_pages]
        is_last = known_stop == len(entry.token_ids) - (not entry.generates)
        assert chunk.samples == (is_last and entry.generates)
        assert chunk.tail_slot == (7 if is_last and not entry.generates else None)
        assert chunk.carry_slot is None or chunk.start == sequence.num_prompt_tokens - 1 > 0
        self.check_speculation(chunk, sequence)

    def check_speculation(self, chunk: Chunk, sequence: Sequence) -> None:
        num_needed, num_ahead = div_ceil(chunk.stop, PAGE_SLOTS), 0
        if chunk.samples:
            assert sequence.sampling is not None
            longest_stop = sequence.num_prompt_tokens + sequence.sampling.max_tokens - 1
            assert chunk.stop <= longest_stop
            num_ahead = min(longest_stop - chunk.stop, self.num_draft_tokens)
        if self.speculation is None or not self.speculation.needs_engine:
            num_ahead = 0
        assert num_needed <= len(chunk.page_indices) <= div_ceil(chunk.stop + num_ahead, PAGE_SLOTS)
        assert chunk.num_drafts <= (self.num_draft_tokens if chunk.samples else 0)

    @property
    def num_draft_tokens(self) -> int:
        return 0 if self.speculation is None else self.speculation.num_draft_tokens

    @precondition(lambda self: self.batch is not None)
    @rule()
    def finish_pass(self) -> None:
        batch = self.batch
        assert batch is not None
        self.batch = None
        self.copying.clear()
        has_drafter = self.speculation is not None and self.speculation.needs_engine
        result = self.engine.run(batch, self.guess if has_drafter else None)
        outcome = self.scheduler.complete(result)
        sampled = dict(result.sampled)
        for chunk in batch.chunks:
            entry = self.inside[chunk.sequence_id]
            entry.num_written = chunk.stop - chunk.num_drafts
            if chunk.samples and chunk.sequence_id not in self.removing:
                entry.token_ids += sampled[chunk.sequence_id]
                entry.num_written += len(sampled[chunk.sequence_id]) - 1
        for part in outcome.prompt_logprobs:
            told = [told.token_id for told in part.entries]
            prompt = part.sequence.token_ids[: part.sequence.num_prompt_tokens]
            assert told == prompt[part.start : part.start + len(told)]
        self.check_outcome(batch, outcome)

    def guess(self, token_ids: tuple[int, ...]) -> tuple[int, ...]:
        """Right up to a place, which may be the end."""
        guesses = continuation(token_ids, num_tokens=self.random.randint(0, self.num_draft_tokens))
        num_right = self.random.randint(0, len(guesses))
        return (*guesses[:num_right], *(guess + 1 for guess in guesses[num_right:]))

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
            self.engine.overwrite(sequence.page_indices)
            self.outside.append(sequence.page_indices)
        for sequence, tokens in outcome.sampled:
            assert sequence.token_ids[-len(tokens) :] == list(tokens)
            if self.inside[sequence.sequence_id].is_finished:
                self.remove_sequence(sequence.sequence_id)

    @invariant()
    def pages_are_conserved_and_owned_as_counted(self) -> None:
        owners = Counter(page for granted in self.outside for page in granted)
        assert all(num_owners == 1 for num_owners in owners.values())
        owners.update(page for entry in self.inside.values() for page in entry.sequence.page_indices)
        owners.update(self.sources.values())
        owners.update(self.copying)
        assert owners == self.pool.owners
        self.pool.audit(num_owned=len(owners))

    @invariant()
    def tokens_and_counts_agree(self) -> None:
        for entry in self.inside.values():
            num_prompt_tokens = entry.sequence.num_prompt_tokens
            num_output_tokens = len(entry.token_ids) - num_prompt_tokens
            prompt = tuple(entry.token_ids[:num_prompt_tokens])
            assert entry.token_ids == [*prompt, *continuation(prompt, num_tokens=num_output_tokens)]
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
