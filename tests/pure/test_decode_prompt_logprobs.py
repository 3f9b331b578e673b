"""The decode role: the logprobs of a prompt's tokens, each told once and in order."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.pure.decode_role_side import PREFILL_TARGET, DecodeRoleSide, certain
from tests.pure.decode_side import DecodeSide
from tests.pure.toy_tokenizer import letter_tokenizer

from pdserve.decode.deltas import deltas_of_prompt
from pdserve.decode.request import LocalReason, Request
from pdserve.ids import Incarnation, RequestId, SequenceId
from pdserve.sampling import SamplingParams
from pdserve.wire.cluster import FinishReason, Generate, PrefillPlace, PrefillTarget

SAMPLING = SamplingParams(max_tokens=4, num_prompt_logprobs=0)


def told_tokens(worker: DecodeRoleSide, request_id: RequestId) -> list[int]:
    """The prompt tokens whose logprobs the gateway got; none after a token, and none but choice 0's."""
    told: list[int] = []
    has_tokens = False
    for delta in worker.deltas:
        if delta.request_id != request_id:
            continue
        has_tokens |= bool(delta.token_ids)
        if delta.prompt_logprobs:
            assert (delta.choice_index, delta.token_ids, delta.text, delta.finish_reason) == (0, (), "", None)
            assert not has_tokens
        told += [entry.token_id for entry in delta.prompt_logprobs]
    return told


@pytest.mark.parametrize("target", [PREFILL_TARGET, None])
@pytest.mark.parametrize("num_choices", [1, 3])
@pytest.mark.parametrize("max_batch_tokens", [5, 32])
def test_prompt_logprobs_come_before_the_answer_of_a_prompt_computed_here(
    target: PrefillTarget | None, num_choices: int, max_batch_tokens: int
) -> None:
    worker = DecodeRoleSide(max_batch_tokens=max_batch_tokens)
    request_id = worker.generate(num_tokens=9, num_choices=num_choices, prefill=target, sampling=SAMPLING)
    assert worker.grants() == []
    while request_id not in worker.finished:
        worker.run_pass(lambda _: "abcd")
    assert told_tokens(worker, request_id) == list(range(1, 9))
    assert worker.deltas[0].prefill is PrefillPlace.LOCAL
    (request,) = worker.role.take_ended()
    assert request.local_reason is LocalReason.PROMPT_LOGPROBS
    assert [worker.text(request_id, index) for index in range(num_choices)] == ["abcd"] * num_choices
    asked = {new.sampling.num_prompt_logprobs for new in worker.announced.values() if new.sequence_id != 0}
    assert asked == ({None} if num_choices > 1 else set())
    assert worker.is_idle()


def test_prompt_logprobs_computed_again_after_a_preemption_are_not_told_again() -> None:
    worker = DecodeRoleSide(DecodeSide(num_pages=6))
    sampling = SamplingParams(max_tokens=9, num_prompt_logprobs=0)
    first = worker.generate("first", prefill=None, sampling=SamplingParams(max_tokens=9))
    second = worker.generate("second", sampling=sampling)
    while worker.role.num_open:
        worker.run_pass(lambda _: "abcdefghijkl")
    assert worker.scheduler.num_preemptions > 0
    assert told_tokens(worker, second) == list(range(1, 8))
    assert (worker.text(first), worker.text(second)) == ("abcdefghi",) * 2
    assert worker.is_idle()


def test_prompt_of_one_token_has_no_logprobs() -> None:
    worker = DecodeRoleSide()
    request_id = worker.generate(num_tokens=1, sampling=SAMPLING)
    worker.sample("abc.")
    assert told_tokens(worker, request_id) == []
    assert worker.finished == {request_id: FinishReason.STOP}


def test_abort_while_a_prompt_with_logprobs_is_computed_leaves_nothing() -> None:
    worker = DecodeRoleSide(max_batch_tokens=5)
    request_id = worker.generate(num_tokens=9, num_choices=2, sampling=SAMPLING)
    worker.run_pass(lambda _: "abcd")
    worker.start_pass()
    worker.role.on_abort(request_id, now_ns=0)
    worker.end_pass(0)
    assert told_tokens(worker, request_id) == [1, 2, 3, 4, 5]
    assert worker.is_idle()


@given(
    num_tokens=st.integers(2, 12),
    restarts=st.lists(st.lists(st.integers(1, 6), max_size=5), max_size=4),
)
def test_prompt_logprobs_are_told_once_however_often_and_in_whatever_chunks_they_come(
    num_tokens: int, restarts: list[list[int]]
) -> None:
    request = Request(
        Generate(
            request_id=RequestId("request"),
            receiver=Incarnation(1),
            dp_rank=0,
            prompt_token_ids=tuple(range(num_tokens)),
            sampling=SAMPLING,
            prefill=None,
            timeout_s=1.0,
        ),
        new_sequence_id=lambda: SequenceId(0),
        tokenizer=letter_tokenizer(),
        now_ns=0,
    )
    told: list[int] = []
    for chunks in [*restarts, [num_tokens]]:  # the last one is whole
        start = 1
        for num_in_chunk in chunks:
            stop = min(start + num_in_chunk, num_tokens)
            deltas = request.tell_prompt(start, list(map(certain, range(start, stop))))
            told += [entry.token_id for delta in deltas for entry in delta.prompt_logprobs]
            assert all(delta.prompt_logprobs for delta in deltas)
            start = stop
    assert told == list(range(1, num_tokens))


@given(num_entries=st.integers(0, 12), max_entries=st.integers(1, 5))
def test_long_prompt_is_told_in_several_deltas_of_bounded_length(num_entries: int, max_entries: int) -> None:
    entries = list(map(certain, range(num_entries)))
    deltas = deltas_of_prompt(RequestId("request"), entries, max_entries=max_entries)
    assert [entry for delta in deltas for entry in delta.prompt_logprobs] == entries
    assert all(1 <= len(delta.prompt_logprobs) <= max_entries for delta in deltas)
