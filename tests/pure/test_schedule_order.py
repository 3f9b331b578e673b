"""The order of prompts: against its definition, and what it does to short and long prompts."""

from collections.abc import Iterator
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.ids import SequenceId
from pdserve.kv.pages import PagePool
from pdserve.schedule.batch import Batch, BatchResult
from pdserve.schedule.limits import ScheduleLimits
from pdserve.schedule.prefill_queue import PrefillQueue
from pdserve.schedule.scheduler import Scheduler
from pdserve.schedule.sequence import Sequence
from pdserve.units import NS_PER_MS, NS_PER_S

PAGE_SLOTS = 16
TOKEN_NS = 4 * NS_PER_MS
"""Time of a pass for each of its tokens, about that of the default model on one core."""


def prompt(sequence_id: int, *, num_tokens: int, arrival_ns: int = 0) -> Sequence:
    """A prefill-only sequence with `num_tokens` tokens to compute."""
    return Sequence(
        sequence_id=SequenceId(sequence_id),
        token_ids=[1] * (num_tokens + 1),
        num_prompt_tokens=num_tokens + 1,
        arrival_ns=arrival_ns,
        sampling=None,
    )


def by_definition(sequences: list[Sequence], *, now_ns: int, ageing_tokens_per_s: int) -> list[SequenceId]:
    def effective_tokens(sequence: Sequence) -> Fraction:
        waited_s = Fraction(now_ns - sequence.arrival_ns, NS_PER_S)
        return sequence.num_uncomputed - ageing_tokens_per_s * waited_s

    ordered = sorted(sequences, key=lambda sequence: (effective_tokens(sequence), sequence.sequence_id))
    return [sequence.sequence_id for sequence in ordered]


@given(
    prompts=st.lists(st.tuples(st.integers(1, 3_000), st.integers(0, 60 * NS_PER_S)), max_size=12),
    ageing_tokens_per_s=st.sampled_from([0, 1, 100, 10_000]),
    later_ns=st.integers(0, 100 * NS_PER_S),
    computed=st.lists(st.tuples(st.integers(0, 11), st.integers(1, 3_000)), max_size=6),
)
def test_schedule_order_is_shortest_remaining_minus_age(
    prompts: list[tuple[int, int]], ageing_tokens_per_s: int, later_ns: int, computed: list[tuple[int, int]]
) -> None:
    queue = PrefillQueue(ageing_tokens_per_s=ageing_tokens_per_s)
    sequences = [prompt(index, num_tokens=n, arrival_ns=arrival) for index, (n, arrival) in enumerate(prompts)]
    for sequence in sequences:
        queue.add(sequence)
    for choice, num_tokens in computed:
        if choice < len(sequences):
            sequence = sequences[choice]
            sequence.num_computed += min(num_tokens, sequence.num_uncomputed - 1)
            queue.reorder(sequence)
    now_ns = max((sequence.arrival_ns for sequence in sequences), default=0) + later_ns
    expected = by_definition(sequences, now_ns=now_ns, ageing_tokens_per_s=ageing_tokens_per_s)
    assert [sequence.sequence_id for sequence in queue] == expected
    assert queue.num_tokens == sum(sequence.num_uncomputed for sequence in sequences)


def test_schedule_order_puts_preempted_first_and_keeps_them_there() -> None:
    queue = PrefillQueue(ageing_tokens_per_s=100)
    long_preempted = prompt(1, num_tokens=500)
    queue.add(prompt(2, num_tokens=5))
    queue.add(long_preempted, preempted=True)
    long_preempted.num_computed = 100
    queue.reorder(long_preempted)
    assert [sequence.sequence_id for sequence in queue] == [1, 2]
    queue.discard(SequenceId(1))
    queue.discard(SequenceId(1))
    assert (len(queue), queue.num_tokens, SequenceId(1) in queue, SequenceId(2) in queue) == (1, 5, False, True)


class PrefillWorld:
    """A scheduler of prefill-only sequences under a clock that a pass moves by its tokens."""

    def __init__(self, limits: ScheduleLimits) -> None:
        self.pool = PagePool(num_pages=2_000)
        self.scheduler = Scheduler(pool=self.pool, page_slots=PAGE_SLOTS, limits=limits)
        self.now_ns = 0
        self.finished_ns: dict[SequenceId, int] = {}

    def add(self, sequence_id: int, *, num_tokens: int) -> Sequence:
        sequence = prompt(sequence_id, num_tokens=num_tokens, arrival_ns=self.now_ns)
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> Batch | None:
        batch = self.scheduler.next_batch(self.now_ns)
        if batch is not None:
            self.now_ns += TOKEN_NS * sum(len(chunk.token_ids) for chunk in batch.chunks)
            result = BatchResult(pass_index=batch.pass_index, sampled=(), started_ns=0, ended_ns=self.now_ns)
            for sequence in self.scheduler.complete(result).prefilled:
                self.finished_ns[sequence.sequence_id] = self.now_ns
                self.pool.release(sequence.page_indices)
        return batch

    def batches(self) -> Iterator[Batch]:
        while (batch := self.step()) is not None:
            yield batch


@pytest.mark.parametrize("max_batch_tokens", [128, 256, 1_024])
def test_schedule_short_prompts_overtake_a_long_one_that_has_begun(max_batch_tokens: int) -> None:
    world = PrefillWorld(ScheduleLimits(max_batch_tokens=max_batch_tokens))
    world.add(0, num_tokens=2_000)
    world.step()
    began_ns = world.now_ns
    for sequence_id in range(1, 11):
        world.add(sequence_id, num_tokens=50)
    num_passes = 0
    while len(world.finished_ns) < 10:
        world.step()
        num_passes += 1
    assert 0 not in world.finished_ns
    assert num_passes <= 10
    saturation_tokens = ScheduleLimits().saturation_tokens
    assert world.now_ns - began_ns <= TOKEN_NS * (500 + saturation_tokens), "they waited for each other alone"
    list(world.batches())
    assert 0 in world.finished_ns
    world.pool.audit(num_owned=0)


def finish_of_long_prompt_s(*, ageing_tokens_per_s: int, stream_s: int) -> float:
    """When a 2,000-token prompt is computed while 50-token prompts keep the worker more than busy."""
    world = PrefillWorld(ScheduleLimits(ageing_tokens_per_s=ageing_tokens_per_s, max_waiting=10_000))
    world.add(0, num_tokens=2_000)
    sequence_id = 0
    while SequenceId(0) not in world.finished_ns:
        while world.now_ns < stream_s * NS_PER_S and world.scheduler.num_waiting < 4:
            sequence_id += 1
            world.add(sequence_id, num_tokens=50)
        assert world.step() is not None
    return world.finished_ns[SequenceId(0)] / NS_PER_S


def test_schedule_ageing_bounds_how_long_short_prompts_delay_a_long_one() -> None:
    window_s = 2_000 / 100
    alone_s = 2_000 * TOKEN_NS / NS_PER_S
    finished_s = finish_of_long_prompt_s(ageing_tokens_per_s=100, stream_s=200)
    assert finished_s <= window_s + alone_s + 1
    assert finish_of_long_prompt_s(ageing_tokens_per_s=0, stream_s=200) > 200, "without ageing it starves"


@given(
    arrivals=st.lists(st.tuples(st.integers(0, 30), st.integers(1, 300)), min_size=1, max_size=10),
    ageing_tokens_per_s=st.sampled_from([0, 100, 2_000]),
)
@settings(max_examples=60, deadline=None)
def test_schedule_chunks_are_those_of_the_slow_reference(
    arrivals: list[tuple[int, int]], ageing_tokens_per_s: int
) -> None:
    """With pages and slots for all, each batch is what the rule says, computed from scratch."""
    limits = ScheduleLimits(
        max_batch_tokens=64, saturation_tokens=24, max_running=16, ageing_tokens_per_s=ageing_tokens_per_s
    )
    world = PrefillWorld(limits)
    inside: dict[SequenceId, Sequence] = {}
    pending = sorted(arrivals)
    step_index = 0
    while pending or inside:
        while pending and pending[0][0] <= step_index:
            sequence_id = SequenceId(len(arrivals) - len(pending))
            inside[sequence_id] = world.add(sequence_id, num_tokens=pending.pop(0)[1])
        order = by_definition(list(inside.values()), now_ns=world.now_ns, ageing_tokens_per_s=ageing_tokens_per_s)
        expected = reference_batch([inside[sequence_id] for sequence_id in order], limits=limits)
        batch = world.step()
        chosen = [(chunk.sequence_id, len(chunk.token_ids)) for chunk in batch.chunks] if batch is not None else []
        assert chosen == expected
        inside = {key: sequence for key, sequence in inside.items() if sequence.num_uncomputed}
        step_index += 1


def reference_batch(ordered: list[Sequence], *, limits: ScheduleLimits) -> list[tuple[SequenceId, int]]:
    """The first takes what it can; then token by token, in order, up to saturation."""
    if not ordered:
        return []
    counts = {ordered[0].sequence_id: min(ordered[0].num_uncomputed, limits.max_batch_tokens)}
    for sequence in ordered[1:]:
        for _ in range(sequence.num_uncomputed):
            if sum(counts.values()) < limits.saturation_tokens:
                counts[sequence.sequence_id] = counts.get(sequence.sequence_id, 0) + 1
    return list(counts.items())
