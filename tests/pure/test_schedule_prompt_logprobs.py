"""Logprobs of prompt tokens: which chunk wants which, once each, also after a preemption."""

import msgspec
import pytest
from tests.pure.schedule_bench import Bench, drafts_of, entry, ranges, result_of, sequence, told_of

from pdserve.config.speculation import Drafter, Speculation
from pdserve.errors import InternalError
from pdserve.ids import SequenceId
from pdserve.sampling import SamplingParams
from pdserve.schedule.limits import ScheduleLimits
from pdserve.schedule.outcome import PromptLogprobs
from pdserve.schedule.sequence import Sequence

ONE_AT_A_TIME = ScheduleLimits(max_batch_tokens=32, saturation_tokens=1, max_running=8)


def asking(sequence_id: int, *, num_tokens: int, max_tokens: int = 8) -> Sequence:
    prompt = sequence(sequence_id, num_tokens=num_tokens, max_tokens=max_tokens)
    prompt.sampling = SamplingParams(max_tokens=max_tokens, num_prompt_logprobs=2)
    return prompt


@pytest.mark.parametrize("num_tokens", [2, 31, 32, 33, 34, 64, 100])
def test_schedule_prompt_logprobs_cover_each_token_but_the_first_once(num_tokens: int) -> None:
    bench = Bench(limits=ONE_AT_A_TIME)
    prompt = bench.add(asking(1, num_tokens=num_tokens))
    told: list[PromptLogprobs] = []
    for _ in range(6):
        told += bench.step()[1].prompt_logprobs
    assert all(part.sequence is prompt for part in told)
    assert [part.start for part in told] == [1 + sum(len(part.entries) for part in told[:n]) for n in range(len(told))]
    assert [entry.token_id for part in told for entry in part.entries] == list(range(1, num_tokens))


def test_schedule_chunk_names_the_next_prompt_token_and_none_after_the_last() -> None:
    bench = Bench(limits=ONE_AT_A_TIME)
    bench.add(asking(1, num_tokens=40))
    chunks = [bench.step()[0].chunks[0] for _ in range(3)]
    assert [(chunk.num_prompt_logprobs, chunk.next_token_id) for chunk in chunks] == [(2, 32), (2, None), (None, None)]


def test_schedule_one_token_prompt_has_no_logprobs_to_tell() -> None:
    bench = Bench()
    bench.add(asking(1, num_tokens=1))
    batch, outcome = bench.step()
    assert batch.chunks[0].num_prompt_logprobs is None
    assert outcome.prompt_logprobs == []


def test_schedule_prompt_logprobs_after_a_preemption_are_of_prompt_tokens_only() -> None:
    bench = Bench(num_pages=5)
    older = bench.add_handed_over(1, num_tokens=8, num_pages=2, max_tokens=4)
    younger = bench.add(asking(2, num_tokens=7))
    for _ in range(2):
        bench.step()
    bench.pool.allocate(bench.pool.num_free)
    while bench.scheduler.num_preemptions == 0:
        bench.step()
    bench.end(older)
    assert len(younger.token_ids) > 8
    batch, outcome = bench.step()
    [chunk] = batch.chunks
    assert (chunk.start, chunk.stop, chunk.samples) == (0, 7, False), "it ends with the prompt"
    assert told_of(chunk) == (1, 2, 3, 4, 5, 6)
    assert [part.entries for part in outcome.prompt_logprobs] == [tuple(entry(token_id) for token_id in range(1, 7))]
    batch, outcome = bench.step()
    assert ranges(batch) == [(2, 7, len(younger.token_ids) - 1)]
    assert batch.chunks[0].num_prompt_logprobs is None


def test_schedule_decode_with_drafts_never_wants_prompt_logprobs() -> None:
    bench = Bench(speculation=Speculation(drafter=Drafter.NGRAM), limits=ONE_AT_A_TIME)
    prompt = asking(1, num_tokens=33)
    prompt.token_ids = [token_id % 5 for token_id in range(33)]
    bench.add(prompt)
    first, last = bench.step()[0].chunks[0], bench.step()[0].chunks[0]
    assert (first.num_prompt_logprobs, first.next_token_id) == (2, 2)
    assert (last.start, last.num_prompt_logprobs) == (32, None)
    assert drafts_of(last) == ()


def test_schedule_sequence_that_does_not_ask_has_no_prompt_logprobs() -> None:
    bench = Bench()
    bench.add(sequence(1, num_tokens=9, max_tokens=2))
    bench.add(sequence(2, num_tokens=9))
    batch, _ = bench.step()
    assert {(chunk.num_prompt_logprobs, chunk.next_token_id) for chunk in batch.chunks} == {(None, None)}


def test_schedule_result_without_prompt_logprobs_that_were_wanted_changes_nothing() -> None:
    bench = Bench()
    prompt = bench.add(asking(1, num_tokens=9))
    batch = bench.start()
    result = result_of(batch)
    for entries in [(), ((SequenceId(1), ()),), ((SequenceId(2), result.prompt_logprobs[0][1]),)]:
        with pytest.raises(InternalError, match="should have prompt logprobs"):
            bench.scheduler.complete(msgspec.structs.replace(result, prompt_logprobs=entries))
    assert prompt.num_computed == 0
    assert bench.scheduler.complete(result).prompt_logprobs[0].start == 1


def test_schedule_removal_during_the_pass_drops_prompt_logprobs() -> None:
    bench = Bench()
    prompt = bench.add(asking(1, num_tokens=9))
    batch = bench.start()
    bench.scheduler.remove(SequenceId(1))
    outcome = bench.finish(batch)
    assert (outcome.removed, outcome.prompt_logprobs) == ([prompt], [])
