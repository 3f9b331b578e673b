"""Drafts in the scheduler: who tries which, in which pages, and what comes back."""

import pytest
from tests.pure.schedule_bench import Bench, drafts_of, ranges, result_of, sequence

from pdserve.config.speculation import Drafter, Speculation
from pdserve.errors import InternalError
from pdserve.ids import SequenceId
from pdserve.sampling import TokenLogprobs
from pdserve.schedule.batch import Batch, BatchResult
from pdserve.schedule.limits import ScheduleLimits
from pdserve.schedule.sequence import Sequence

NGRAM = Speculation(drafter=Drafter.NGRAM, num_draft_tokens=4)
ENGINE = Speculation(drafter=Drafter.MTP, num_draft_tokens=4)
PLENTY = ScheduleLimits(max_batch_tokens=64, saturation_tokens=64, max_running=8)
GUESSES = (21, 22, 23, 24)


def add_repeating(bench: Bench, sequence_id: int, *, max_tokens: int = 20) -> Sequence:
    """Its prompt 0 1 2 3 4 5 0 1 2 3 suggests 4 5 0 1."""
    repeating = bench.add_handed_over(sequence_id, num_tokens=10, num_pages=3, max_tokens=max_tokens)
    repeating.token_ids = [0, 1, 2, 3, 4, 5, 0, 1, 2, 3]
    return repeating


def drafts(batch: Batch) -> list[tuple[int, ...]]:
    return [drafts_of(chunk) for chunk in batch.chunks]


def test_schedule_drafts_from_ngrams_follow_the_last_known_token() -> None:
    bench = Bench(speculation=NGRAM)
    repeating = add_repeating(bench, 1)
    batch = bench.start()
    [chunk] = batch.chunks
    assert (chunk.start, chunk.token_ids, chunk.num_drafts) == (9, (3, 4, 5, 0, 1), 4)
    assert chunk.page_indices == (0, 1, 2, 3), "the page of the drafts came from the pool"
    outcome = bench.finish(batch, num_right=2)
    assert outcome.sampled == [(repeating, (4, 5, 9))]
    assert (outcome.num_drafts, outcome.num_drafts_accepted) == (4, 2)
    assert (repeating.token_ids[10:], repeating.num_computed) == ([4, 5, 9], 12)
    batch, _ = bench.step()
    assert ranges(batch) == [(1, 12, 13)], "nothing followed 5 9 before"


@pytest.mark.parametrize("num_right", range(5))
def test_schedule_computed_tokens_are_all_but_the_last_whatever_drafts_are_right(num_right: int) -> None:
    bench = Bench(speculation=NGRAM)
    repeating = add_repeating(bench, 1)
    bench.finish(bench.start(), num_right=num_right)
    assert len(repeating.token_ids) == 10 + num_right + 1
    assert repeating.num_computed == len(repeating.token_ids) - 1


@pytest.mark.parametrize(("max_tokens", "num_drafts"), [(1, 0), (2, 1), (4, 3), (5, 4), (6, 4)])
def test_schedule_drafts_never_exceed_what_max_tokens_leaves(max_tokens: int, num_drafts: int) -> None:
    bench = Bench(speculation=NGRAM)
    repeating = add_repeating(bench, 1, max_tokens=max_tokens)
    batch = bench.start()
    assert [chunk.num_drafts for chunk in batch.chunks] == [num_drafts]
    bench.finish(batch, num_right=4)
    assert len(repeating.token_ids) <= 10 + max_tokens


def test_schedule_drafts_share_the_tokens_up_to_saturation_and_first_guesses_go_first() -> None:
    bench = Bench(speculation=NGRAM, limits=ScheduleLimits(max_batch_tokens=32, saturation_tokens=8, max_running=8))
    for sequence_id in range(3):
        add_repeating(bench, sequence_id)
    batch, _ = bench.step()
    assert drafts(batch) == [(4, 5), (4, 5), (4,)]


def test_schedule_drafts_give_way_to_prompts() -> None:
    bench = Bench(speculation=NGRAM)
    add_repeating(bench, 1)
    bench.add(sequence(2, num_tokens=100))
    batch, _ = bench.step()
    assert ranges(batch) == [(1, 9, 10), (2, 0, 31)]


def test_schedule_drafts_preempt_no_one_and_leave_a_page_for_each_other_sequence() -> None:
    bench = Bench(num_pages=7, speculation=NGRAM)
    first, second = add_repeating(bench, 1, max_tokens=8), add_repeating(bench, 2, max_tokens=8)
    batch, _ = bench.step()
    assert drafts(batch) == [(4, 5), (4, 5)], "as many as their pages hold: the one that is free is the other's"
    assert (len(first.page_indices), len(second.page_indices)) == (3, 3)
    assert bench.pool.num_free == 1
    assert bench.scheduler.num_preemptions == 0


def test_schedule_drafts_of_the_engine_are_tried_once_in_the_pass_after_it_made_them() -> None:
    bench = Bench(speculation=ENGINE, limits=PLENTY)
    decoding = bench.add_handed_over(1, num_tokens=5, num_pages=2, max_tokens=20)
    batch = bench.start()
    assert drafts(batch) == [()]
    bench.finish(batch, guesses={1: (*GUESSES, 25)})
    batch = bench.start()
    assert drafts(batch) == [GUESSES], "no more than are wanted"
    bench.finish(batch, num_right=1)
    assert decoding.token_ids[5:] == [9, 21, 9]
    assert drafts(bench.start()) == [()]


def test_schedule_engine_drafter_gets_pages_to_look_ahead_where_a_sequence_samples() -> None:
    bench = Bench(speculation=ENGINE, limits=PLENTY)
    bench.add(sequence(1, num_tokens=8, max_tokens=20))
    bench.add(sequence(2, num_tokens=9))
    batch, _ = bench.step()
    assert ranges(batch) == [(1, 0, 8), (2, 0, 8)]
    assert [len(chunk.page_indices) for chunk in batch.chunks] == [3, 2], "none where nothing is sampled"


def test_schedule_engine_drafter_goes_without_pages_that_others_need_or_no_token_can_fill() -> None:
    bench = Bench(num_pages=4, speculation=ENGINE, limits=PLENTY)
    bench.add_handed_over(1, num_tokens=8, num_pages=2, max_tokens=2)
    bench.add_handed_over(2, num_tokens=4, num_pages=1, max_tokens=8)
    batch = bench.start()
    assert [len(chunk.page_indices) for chunk in batch.chunks] == [2, 1]
    bench.finish(batch)
    lone = Bench(speculation=ENGINE, limits=PLENTY)
    lone.add_handed_over(1, num_tokens=8, num_pages=2, max_tokens=1)
    batch, _ = lone.step()
    assert len(batch.chunks[0].page_indices) == 2, "its one token is never computed"


def test_schedule_preemption_drops_guesses() -> None:
    bench = Bench(num_pages=4, speculation=ENGINE, limits=PLENTY)
    older = bench.add_handed_over(1, num_tokens=8, num_pages=2)
    younger = bench.add_handed_over(2, num_tokens=8, num_pages=2)
    bench.finish(bench.start(), guesses={2: GUESSES})
    bench.step()
    assert bench.scheduler.num_preemptions == 1
    assert (younger.draft_token_ids, younger.page_indices) == ((), [])
    bench.end(older)
    batch, _ = bench.step()
    assert (ranges(batch), drafts(batch)) == ([(2, 0, 9)], [()])


def test_schedule_removal_during_the_pass_drops_tokens_of_right_drafts_too() -> None:
    bench = Bench(speculation=NGRAM)
    repeating = add_repeating(bench, 1)
    batch = bench.start()
    bench.scheduler.remove(SequenceId(1))
    outcome = bench.finish(batch, num_right=4)
    assert (outcome.sampled, outcome.removed) == ([], [repeating])
    assert (len(repeating.token_ids), repeating.num_computed) == (10, 10)
    bench.pool.release(repeating.page_indices)
    bench.pool.audit(num_owned=0)


def test_schedule_carry_goes_with_the_first_chunk_and_stays_until_that_is_computed() -> None:
    bench = Bench(speculation=ENGINE)
    handed_over = bench.add_handed_over(1, num_tokens=5, num_pages=2)
    handed_over.carry_slot = 3
    batch = bench.start()
    assert (batch.chunks[0].carry_slot, handed_over.carry_slot) == (3, 3)
    bench.finish(batch)
    assert handed_over.carry_slot is None
    batch, _ = bench.step()
    assert batch.chunks[0].carry_slot is None


def test_schedule_preemption_before_the_first_chunk_drops_the_carry() -> None:
    bench = Bench(num_pages=3, speculation=ENGINE)
    bench.add_handed_over(1, num_tokens=9, num_pages=2, max_tokens=4)
    younger = bench.add_handed_over(2, num_tokens=5, num_pages=1)
    younger.carry_slot = 3
    batch, _ = bench.step()
    assert ranges(batch) == [(1, 8, 9)]
    assert younger.carry_slot is None


@pytest.mark.parametrize(
    ("token_ids", "logprobs", "guesses", "message"),
    [
        ((), None, {}, "got tokens"),
        ((4, 5, 0, 1, 9, 9), None, {}, "got tokens"),
        ((4, 6, 9), None, {}, "which do not go with drafts"),
        ((4, 9), 1, {}, "has logprobs of 1 tokens, and 2 tokens"),
        ((4, 9), None, {7: (1,)}, "sequence 7 was not sampled, but has drafts"),
    ],
)
def test_schedule_result_that_contradicts_the_drafts_changes_nothing(
    token_ids: tuple[int, ...], logprobs: int | None, guesses: dict[int, tuple[int, ...]], message: str
) -> None:
    bench = Bench(speculation=NGRAM)
    repeating = add_repeating(bench, 1)
    batch = bench.start()
    entries = (TokenLogprobs(token_id=4, logprob=-1.0, top=()),) * (logprobs or 0)
    result = BatchResult(
        pass_index=0,
        sampled=((SequenceId(1), token_ids),),
        logprobs=() if logprobs is None else ((SequenceId(1), entries),),
        drafts=tuple((SequenceId(sequence_id), tokens) for sequence_id, tokens in guesses.items()),
        started_ns=0,
        ended_ns=1,
    )
    with pytest.raises(InternalError, match=message):
        bench.scheduler.complete(result)
    assert (len(repeating.token_ids), repeating.num_computed) == (10, 9)
    assert bench.scheduler.complete(result_of(batch)).sampled == [(repeating, (9,))]
