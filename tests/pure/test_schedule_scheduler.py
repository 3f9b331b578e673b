"""The scheduler, one rule at a time."""

import pytest
from tests.pure.schedule_bench import Bench, ranges, sequence

from pdserve.errors import CapacityError, ConfigError, ContextOverflow, InternalError
from pdserve.ids import PageIndex, SequenceId
from pdserve.schedule.batch import BatchResult, Chunk
from pdserve.schedule.limits import ScheduleLimits
from pdserve.schedule.outcome import StepOutcome


def test_schedule_prefill_only_leaves_its_last_token_and_fills_the_tail_once() -> None:
    bench = Bench()
    bench.add(sequence(1, num_tokens=50))
    first, outcome = bench.step()
    assert ranges(first) == [(1, 0, 32)]
    assert first.chunks[0].tail_slot is None
    assert outcome == StepOutcome()
    second, outcome = bench.step()
    assert second.chunks == (
        Chunk(
            sequence_id=SequenceId(1),
            start=32,
            token_ids=tuple(range(32, 49)),
            page_indices=tuple(range(13)),
            samples=False,
            tail_slot=5,
        ),
    )
    assert second.new_sequences == ()
    [prefilled] = outcome.prefilled
    assert prefilled.page_indices == list(range(13))
    assert bench.scheduler.num_running == 0
    assert bench.scheduler.next_batch(0) is None


def test_schedule_local_prefill_samples_at_the_end_of_its_last_chunk() -> None:
    bench = Bench()
    prompt = bench.add(sequence(1, num_tokens=50, max_tokens=2))
    first, _ = bench.step()
    assert (ranges(first), first.new_sequences) == ([(1, 0, 32)], ())
    second, outcome = bench.step()
    assert ranges(second) == [(1, 32, 50)]
    assert [new.sequence_id for new in second.new_sequences] == [1]
    assert outcome.sampled == [(prompt, (9,))]
    third, _ = bench.step()
    assert (ranges(third), third.new_sequences) == ([(1, 50, 51)], ())


def test_schedule_handed_over_sequence_decodes_in_the_next_batch_before_any_prompt() -> None:
    bench = Bench()
    bench.add(sequence(1, num_tokens=100))
    bench.step()
    bench.add_handed_over(2, num_tokens=9, num_pages=2)
    batch, outcome = bench.step()
    assert ranges(batch) == [(2, 8, 9), (1, 32, 63)]
    assert batch.chunks[0].page_indices == (25, 26, 27), "the page of its last token came from the pool"
    assert [tokens for _, tokens in outcome.sampled] == [(9,)]


def test_schedule_short_prompts_share_a_batch_only_up_to_saturation() -> None:
    bench = Bench()
    bench.add(sequence(1, num_tokens=101))
    bench.add(sequence(2, num_tokens=11))
    bench.add(sequence(3, num_tokens=13))
    batch, _ = bench.step()
    assert ranges(batch) == [(2, 0, 10), (3, 0, 6)]
    batch, _ = bench.step()
    assert ranges(batch) == [(3, 6, 12), (1, 0, 10)]
    batch, _ = bench.step()
    assert ranges(batch) == [(1, 10, 42)]


def test_schedule_queue_over_its_bound_refuses_but_takes_handed_over() -> None:
    bench = Bench()
    for sequence_id in range(4):
        bench.add(sequence(sequence_id, num_tokens=5))
    with pytest.raises(CapacityError, match="4 sequences wait"):
        bench.add(sequence(4, num_tokens=5))
    assert (bench.scheduler.num_waiting, bench.scheduler.num_waiting_tokens) == (4, 16)
    bench.add_handed_over(5, num_tokens=5, num_pages=1)
    assert bench.scheduler.num_waiting == 5


@pytest.mark.parametrize(("num_tokens", "max_tokens", "fits"), [(29, 4, True), (29, 5, False), (33, None, True)])
def test_schedule_sequence_longer_than_the_pool_is_refused(num_tokens: int, max_tokens: int | None, fits: bool) -> None:
    bench = Bench(num_pages=8)
    longest = sequence(1, num_tokens=num_tokens, max_tokens=max_tokens)
    if fits:
        bench.add(longest)
        return
    with pytest.raises(ContextOverflow, match="may need 9 pages of 4 tokens, the KV cache has 8"):
        bench.add(longest)
    assert bench.scheduler.num_waiting == 0


def test_schedule_remove_of_a_waiting_sequence_gives_it_back_at_once() -> None:
    bench = Bench()
    waiting = bench.add(sequence(1, num_tokens=5))
    assert bench.scheduler.remove(SequenceId(1)) is waiting
    assert bench.scheduler.next_batch(0) is None
    with pytest.raises(InternalError, match="sequence 1 is not in the scheduler"):
        bench.scheduler.remove(SequenceId(1))


def test_schedule_remove_during_the_pass_drops_the_token_and_comes_with_the_outcome() -> None:
    bench = Bench()
    running = bench.add_handed_over(1, num_tokens=5, num_pages=2)
    batch = bench.start()
    assert bench.scheduler.remove(SequenceId(1)) is None
    outcome = bench.finish(batch)
    assert (outcome.sampled, outcome.removed) == ([], [running])
    assert running.token_ids == list(range(5))
    bench.pool.release(running.page_indices)
    bench.pool.audit(num_owned=0)


def test_schedule_executor_is_told_once_that_a_sequence_it_met_has_ended() -> None:
    bench = Bench(limits=ScheduleLimits(max_batch_tokens=32, saturation_tokens=1, max_running=8))
    bench.add_handed_over(1, num_tokens=5, num_pages=2)
    bench.add(sequence(2, num_tokens=10))
    bench.add(sequence(3, num_tokens=100, max_tokens=2))
    _, outcome = bench.step()
    assert [prefilled.sequence_id for prefilled in outcome.prefilled] == [2]
    bench.scheduler.remove(SequenceId(1))
    bench.scheduler.remove(SequenceId(3))
    bench.add(sequence(4, num_tokens=50))
    batches = [bench.step()[0] for _ in range(2)]
    assert [batch.ended_sequences for batch in batches] == [(1, 2), ()], "the third was in no batch"


def test_schedule_short_pool_preempts_the_youngest_and_resumes_it_with_its_output() -> None:
    bench = Bench(num_pages=4)
    older = bench.add_handed_over(1, num_tokens=8, num_pages=2)
    younger = bench.add_handed_over(2, num_tokens=7, num_pages=2)
    bench.step()
    batch, _ = bench.step()
    assert ranges(batch) == [(1, 8, 9)]
    assert batch.ended_sequences == (2,)
    assert (younger.page_indices, younger.num_computed, younger.token_ids) == ([], 0, [*range(7), 9])
    assert bench.scheduler.num_preemptions == 1
    bench.scheduler.remove(SequenceId(1))
    bench.pool.release(older.page_indices)
    batch, outcome = bench.step()
    assert ranges(batch) == [(2, 0, 8)]
    assert [new.output_token_ids for new in batch.new_sequences] == [(9,)]
    assert outcome.sampled == [(younger, (9,))]


def test_schedule_preempted_sequence_goes_before_shorter_prompts() -> None:
    bench = Bench(num_pages=5)
    older = bench.add_handed_over(1, num_tokens=8, num_pages=2)
    bench.add_handed_over(2, num_tokens=11, num_pages=3)
    bench.step()
    bench.add(sequence(3, num_tokens=3))
    batch, _ = bench.step()
    assert ranges(batch) == [(1, 8, 9)], "the short prompt does not slip past the preempted one"
    bench.scheduler.remove(SequenceId(1))
    bench.pool.release(older.page_indices)
    batch, _ = bench.step()
    assert ranges(batch) == [(2, 0, 12), (3, 0, 2)]


def test_schedule_sequence_readmitted_in_the_pass_of_its_preemption_ends_and_begins_anew() -> None:
    bench = Bench(num_pages=7)
    bench.add_handed_over(1, num_tokens=4, num_pages=1)
    bench.add_handed_over(2, num_tokens=6, num_pages=6)
    bench.step()
    batch, _ = bench.step()
    assert bench.scheduler.num_preemptions == 1
    assert ranges(batch) == [(1, 4, 5), (2, 0, 7)]
    assert batch.ended_sequences == (2,)
    assert [(new.sequence_id, new.output_token_ids) for new in batch.new_sequences] == [(2, (9,))]


def test_schedule_prefill_only_sequence_is_never_preempted() -> None:
    bench = Bench(num_pages=12)
    bench.add_handed_over(1, num_tokens=4, num_pages=1)
    prefilling = bench.add(sequence(2, num_tokens=41))
    bench.step()
    bench.pool.allocate(bench.pool.num_free)
    batch, outcome = bench.step()
    assert ranges(batch) == [(2, 31, 40)], "the decode waits for a page, the younger prefill goes on"
    assert outcome.prefilled == [prefilling]
    bench.pool.release(prefilling.page_indices)
    batch, _ = bench.step()
    assert ranges(batch) == [(1, 4, 5)]


def test_schedule_youngest_waits_with_its_pages_when_the_pool_is_empty() -> None:
    bench = Bench(num_pages=4)
    bench.add_handed_over(1, num_tokens=6, num_pages=2)
    younger = bench.add_handed_over(2, num_tokens=9, num_pages=2)
    batch, _ = bench.step()
    assert ranges(batch) == [(1, 5, 6)]
    assert len(younger.page_indices) == 2
    assert bench.scheduler.num_preemptions == 0


def test_schedule_newcomer_leaves_a_page_for_each_sequence_that_generates() -> None:
    bench = Bench(num_pages=4)
    bench.add_handed_over(1, num_tokens=4, num_pages=1)
    bench.add(sequence(2, num_tokens=13))
    batch, _ = bench.step()
    assert ranges(batch) == [(1, 3, 4)]
    bench.scheduler.remove(SequenceId(1))
    batch, _ = bench.step()
    assert ranges(batch) == [(2, 0, 12)]


def test_schedule_records_when_a_sequence_was_first_scheduled() -> None:
    bench = Bench()
    prompt = bench.add(sequence(1, num_tokens=100))
    assert prompt.scheduled_ns is None
    bench.finish(bench.start(now_ns=70))
    bench.finish(bench.start(now_ns=80))
    assert prompt.scheduled_ns == 70


def test_schedule_second_batch_before_completion_is_a_bug() -> None:
    bench = Bench()
    bench.add(sequence(1, num_tokens=5))
    batch = bench.start()
    with pytest.raises(InternalError, match="pass 0 has not been completed"):
        bench.scheduler.next_batch(0)
    assert bench.finish(batch).prefilled


def test_schedule_result_of_another_batch_changes_nothing() -> None:
    bench = Bench()
    decoding = bench.add_handed_over(1, num_tokens=5, num_pages=2)
    batch = bench.start()
    wrong_pass = BatchResult(pass_index=3, sampled=(), started_ns=0, ended_ns=1)
    without_token = BatchResult(pass_index=0, sampled=(), started_ns=0, ended_ns=1)
    for result, message in [(wrong_pass, "running one is 0"), (without_token, "should have sampled")]:
        with pytest.raises(InternalError, match=message):
            bench.scheduler.complete(result)
    assert decoding.num_computed == 4
    bench.finish(batch)
    with pytest.raises(InternalError, match="running one is none"):
        bench.finish(batch)


def test_schedule_sequence_in_an_impossible_state_is_refused() -> None:
    bench = Bench()
    nothing_to_do = sequence(1, num_tokens=1)
    half_computed = sequence(2, num_tokens=20, max_tokens=1)
    half_computed.num_computed, half_computed.page_indices = 8, [PageIndex(0), PageIndex(1)]
    short_of_pages = sequence(3, num_tokens=20, max_tokens=1)
    short_of_pages.num_computed, short_of_pages.page_indices = 19, [PageIndex(0)]
    for refused, message in [
        (nothing_to_do, "sequence 1 has nothing to compute"),
        (half_computed, "sequence 2 brings 2 pages with 8 of 20 tokens computed"),
        (short_of_pages, "sequence 3 brings 1 pages with 19 of 20 tokens computed"),
    ]:
        with pytest.raises(InternalError, match=message):
            bench.add(refused)
    bench.add(sequence(4, num_tokens=5))
    with pytest.raises(InternalError, match="sequence 4 is in the scheduler already"):
        bench.add(sequence(4, num_tokens=5))
    assert bench.scheduler.num_waiting == 1


@pytest.mark.parametrize(
    ("field", "limit"),
    [
        ("saturation_tokens", 33),
        ("saturation_tokens", 0),
        ("max_running", 32),
        ("max_running", 0),
        ("max_waiting", 0),
        ("ageing_tokens_per_s", -1),
    ],
)
def test_schedule_limits_that_contradict_each_other_name_the_field(field: str, limit: int) -> None:
    values = {"max_batch_tokens": 32, "saturation_tokens": 16, "max_running": 8, "max_waiting": 4} | {field: limit}
    with pytest.raises(ConfigError, match=f"{field} is {limit}"):
        ScheduleLimits(**values)


def test_schedule_running_slots_bound_the_batch_and_handed_over_take_them_first() -> None:
    bench = Bench()
    for sequence_id in range(9):
        bench.add_handed_over(sequence_id, num_tokens=4, num_pages=2)
    bench.add(sequence(20, num_tokens=3))
    batch, _ = bench.step()
    assert [chunk.sequence_id for chunk in batch.chunks] == list(range(8))
    assert (bench.scheduler.num_running, bench.scheduler.num_waiting) == (8, 2)
    bench.scheduler.remove(SequenceId(0))
    batch, _ = bench.step()
    assert [chunk.sequence_id for chunk in batch.chunks] == list(range(1, 9))


def test_schedule_sequence_preempted_for_an_older_one_is_not_in_the_same_batch() -> None:
    bench = Bench(num_pages=3)
    bench.add_handed_over(2, num_tokens=7, num_pages=2, max_tokens=4)
    bench.add_handed_over(1, num_tokens=5, num_pages=1, max_tokens=4)
    batch, _ = bench.step()
    assert ranges(batch) == [(1, 4, 5)]
    assert bench.scheduler.num_preemptions == 1


def test_schedule_handed_over_sequence_that_waits_for_a_slot_gives_its_pages_to_a_running_one() -> None:
    bench = Bench(num_pages=2, limits=ScheduleLimits(max_running=1))
    bench.add_handed_over(2, num_tokens=5, num_pages=1, max_tokens=4)
    waiting = bench.add_handed_over(1, num_tokens=4, num_pages=1, max_tokens=4)
    batch, _ = bench.step()
    assert ranges(batch) == [(2, 4, 5)], "though it is younger, else the two would wait for each other"
    assert (waiting.page_indices, waiting.num_computed) == ([], 0)
    assert bench.scheduler.num_waiting == 1
