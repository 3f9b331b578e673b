"""Forked sequences: which pages they share, what is copied when, and who owns what until then."""

import pytest
from tests.pure.schedule_bench import Bench, ranges, sequence

from pdserve.errors import ContextOverflow, InternalError
from pdserve.ids import PageIndex, SequenceId
from pdserve.schedule.batch import PageCopy
from pdserve.schedule.limits import ScheduleLimits


def test_schedule_fork_shares_full_pages_and_copies_the_last_with_its_first_chunk() -> None:
    bench = Bench()
    parent = bench.add_handed_over(1, num_tokens=11, num_pages=3)
    child = bench.fork(2, parent)
    assert child.page_indices == [0, 1, 3]
    batch, outcome = bench.step()
    assert batch.copies == (PageCopy(source=2, target=3),)
    assert ranges(batch) == [(1, 10, 11), (2, 10, 11)]
    assert [new.sequence_id for new in batch.new_sequences] == [1, 2]
    assert [sequence.sequence_id for sequence, _ in outcome.sampled] == [1, 2]
    bench.pool.audit(num_owned=4)
    batch, _ = bench.step()
    assert batch.copies == ()
    bench.end(parent)
    bench.pool.audit(num_owned=3)
    bench.end(child)
    bench.pool.audit(num_owned=0)


def test_schedule_fork_at_the_end_of_a_page_copies_nothing() -> None:
    bench = Bench()
    parent = bench.add_handed_over(1, num_tokens=9, num_pages=2)
    child = bench.fork(2, parent)
    batch, _ = bench.step()
    assert batch.copies == ()
    assert (parent.page_indices, child.page_indices) == ([0, 1, 2], [0, 1, 3])


def test_schedule_source_of_a_copy_stays_owned_until_its_pass_is_completed() -> None:
    bench = Bench(limits=ScheduleLimits(max_running=1))
    parent = bench.add_handed_over(1, num_tokens=4, num_pages=1)
    child = bench.fork(2, parent)
    batch, _ = bench.step()
    assert (ranges(batch), batch.copies) == ([(1, 3, 4)], ()), "the child has no slot yet"
    bench.end(parent)
    assert parent.page_indices[0] not in bench.pool.allocate(bench.pool.num_free)
    batch = bench.start()
    assert batch.copies == (PageCopy(source=0, target=1),)
    assert bench.pool.num_free == 0
    bench.finish(batch)
    assert bench.pool.allocate(1) == [0]
    assert child.num_computed == 4


def test_schedule_fork_removed_before_its_copy_gives_up_source_and_target() -> None:
    bench = Bench()
    parent = bench.add_handed_over(1, num_tokens=7, num_pages=2)
    bench.end(bench.fork(2, parent))
    bench.end(parent)
    bench.pool.audit(num_owned=0)


def test_schedule_fork_removed_during_the_pass_of_its_copy_keeps_its_pages_until_then() -> None:
    bench = Bench()
    parent = bench.add_handed_over(1, num_tokens=7, num_pages=2)
    child = bench.fork(2, parent)
    batch = bench.start()
    assert bench.scheduler.remove(SequenceId(2)) is None
    bench.pool.audit(num_owned=3)
    outcome = bench.finish(batch)
    assert outcome.removed == [child]
    bench.pool.release(child.page_indices)
    bench.end(parent)
    bench.pool.audit(num_owned=0)


def test_schedule_fork_preempted_before_its_copy_computes_its_prompt_itself() -> None:
    bench = Bench(num_pages=5, limits=ScheduleLimits(max_running=1))
    parent = bench.add_handed_over(1, num_tokens=7, num_pages=2)
    child = bench.fork(2, parent)
    child.carry_slot = 3
    bench.pool.allocate(2)
    batches = [bench.step()[0] for _ in range(3)]
    assert ranges(batches[2]) == [(1, 8, 9)], "in the page that was to be the child's"
    assert (child.page_indices, child.num_computed, child.carry_slot) == ([], 0, None)
    bench.pool.audit(num_owned=5)
    bench.end(parent)
    batch, _ = bench.step()
    assert (ranges(batch), batch.copies) == ([(2, 0, 7)], ())


def test_schedule_fork_without_a_free_page_is_one_that_computes_its_prompt_itself() -> None:
    bench = Bench(num_pages=3, limits=ScheduleLimits(max_waiting=1))
    parent = bench.add_handed_over(1, num_tokens=7, num_pages=2, max_tokens=4)
    bench.pool.allocate(1)
    bench.add(sequence(9, num_tokens=12))
    child = bench.fork(2, parent)
    assert (child.page_indices, child.num_computed, child.carry_slot) == ([], 0, None)
    assert bench.scheduler.num_waiting == 3, "not refused, though the queue is full"
    bench.end(parent)
    batch, _ = bench.step()
    assert (ranges(batch), batch.copies) == ([(2, 0, 7)], ())


def test_schedule_fork_of_a_one_token_prompt_has_nothing_to_share() -> None:
    bench = Bench()
    child = sequence(2, num_tokens=1, max_tokens=2)
    bench.scheduler.fork(child, page_indices=[])
    batch, _ = bench.step()
    assert (ranges(batch), batch.copies) == ([(2, 0, 1)], ())


def test_schedule_forks_from_pages_outside_the_scheduler_leave_them_to_their_owner() -> None:
    bench = Bench()
    landed = bench.pool.allocate(3)
    children = [sequence(sequence_id, num_tokens=11, max_tokens=2) for sequence_id in range(3)]
    for child in children:
        child.num_computed = 10
        bench.scheduler.fork(child, page_indices=landed)
    bench.pool.release(landed)
    batch, _ = bench.step()
    assert [copy.source for copy in batch.copies] == [2, 2, 2]
    assert [copy.target for copy in batch.copies] == [child.page_indices[2] for child in children] == [3, 4, 5]
    for child in children:
        bench.end(child)
    bench.pool.audit(num_owned=0)


def test_schedule_preemption_goes_on_while_shared_pages_do_not_come_free() -> None:
    bench = Bench(num_pages=4)
    parent = bench.add_handed_over(1, num_tokens=9, num_pages=2)
    children = [bench.fork(2, parent), bench.fork(3, parent)]
    batch, _ = bench.step()
    assert ranges(batch) == [(1, 8, 9), (2, 8, 9)], "two pages were free, the youngest waits"
    for _ in range(3):
        bench.step()
    batch, _ = bench.step()
    assert ranges(batch) == [(1, 12, 13)]
    assert [child.page_indices for child in children] == [[], []], "the first to go freed nothing"
    assert bench.scheduler.num_preemptions == 2
    bench.pool.audit(num_owned=4)


def test_schedule_fork_that_can_not_be_is_refused() -> None:
    bench = Bench(num_pages=8)
    parent = bench.add_handed_over(1, num_tokens=7, num_pages=2)
    with_pages, short, uncomputed, too_long = (sequence(n, num_tokens=7, max_tokens=2) for n in range(2, 6))
    with_pages.page_indices, with_pages.num_computed = [PageIndex(0)], 6
    short.num_computed = 6
    too_long.num_computed = 6
    for child, pages in [(with_pages, parent.page_indices), (short, [PageIndex(0)]), (uncomputed, parent.page_indices)]:
        with pytest.raises(InternalError, match=f"sequence {child.sequence_id} can't fork"):
            bench.scheduler.fork(child, page_indices=pages)
    with pytest.raises(InternalError, match="sequence 1 is in the scheduler already"):
        bench.scheduler.fork(parent, page_indices=parent.page_indices)
    too_long.token_ids *= 6
    too_long.num_prompt_tokens, too_long.num_computed = 42, 41
    with pytest.raises(ContextOverflow):
        bench.scheduler.fork(too_long, page_indices=[PageIndex(0)] * 11)
    assert bench.scheduler.num_waiting == 1
    bench.pool.audit(num_owned=2)
