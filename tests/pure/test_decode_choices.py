"""The decode role: several answers to one prompt, each as if it were asked for alone."""

from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.pure.decode_role_side import PREFILL_TARGET, AnswerOf, DecodeRoleSide
from tests.pure.decode_side import DecodeSide
from tests.pure.toy_tokenizer import LETTERS

from pdserve.config.speculation import Drafter, Speculation
from pdserve.decode.limits import DecodeLimits, why_impossible
from pdserve.ids import Incarnation, RequestId
from pdserve.sampling import SamplingParams
from pdserve.telemetry.instants import Instant
from pdserve.units import NS_PER_S
from pdserve.wire.cluster import MAX_CHOICES, FailureKind, FinishReason, Generate

NUM_CHOICES = 3


def drawn_from_seed(sampling: SamplingParams) -> str:
    """An engine's answer, which depends on the seed alone."""
    assert sampling.seed is not None and 0 <= sampling.seed < 2**64
    draw = Random(f"seed {sampling.seed}")
    return "".join(draw.choices(LETTERS + ".", weights=[1] * len(LETTERS) + [2], k=48))


def answer_alone(sampling: SamplingParams, *, seed: int) -> str:
    """Of a request for one answer, as the rules say it."""
    answer = drawn_from_seed(SamplingParams(max_tokens=1, seed=seed % 2**64))
    return answer[: min(sampling.max_tokens, f"{answer}.".index("."))]


def by_seed(answers: dict[int, str]) -> AnswerOf:
    """An engine that answers so."""
    return lambda sampling: answers[-1 if sampling.seed is None else sampling.seed]


@pytest.fixture
def worker() -> DecodeRoleSide:
    return DecodeRoleSide()


@given(
    seed=st.sampled_from([0, 7, -1, 2**63 - 1, 2**64 - 2]),
    num_choices=st.integers(1, 5),
    num_tokens=st.integers(1, 14),
    max_tokens=st.integers(1, 10),
    is_remote=st.booleans(),
    max_batch_tokens=st.sampled_from([5, 32]),
    num_pages=st.sampled_from([8, 40]),
    guesses=st.lists(st.sampled_from(["", "+", "+++", "+z+", "zz"]), min_size=1, max_size=4),
)
def test_choice_is_the_answer_of_a_request_for_one_with_its_seed(
    *,
    seed: int,
    num_choices: int,
    num_tokens: int,
    max_tokens: int,
    is_remote: bool,
    max_batch_tokens: int,
    num_pages: int,
    guesses: list[str],
) -> None:
    """Handed over or not, in chunks, with few pages (so preempted) and with guesses right and wrong."""
    worker = DecodeRoleSide(DecodeSide(num_pages=num_pages), max_batch_tokens=max_batch_tokens)
    sampling = SamplingParams(max_tokens=max_tokens, seed=seed)
    request_id = worker.generate(
        num_tokens=num_tokens,
        num_choices=num_choices,
        prefill=PREFILL_TARGET if is_remote else None,
        sampling=sampling,
    )
    for grant in worker.grants():
        worker.land(grant)
    for turn in range(200):
        if request_id in worker.finished:
            break
        worker.run_pass(drawn_from_seed, guess=guesses[turn % len(guesses)])
    expected = [answer_alone(sampling, seed=seed + index) for index in range(num_choices)]
    assert [worker.text(request_id, index) for index in range(num_choices)] == expected
    assert [len(worker.tokens(request_id, index)) for index in range(num_choices)] == [
        min(len(text) + 1, max_tokens) for text in expected
    ]
    assert worker.is_idle()


def test_choices_without_a_seed_are_left_to_the_engine(worker: DecodeRoleSide) -> None:
    worker.generate(num_choices=NUM_CHOICES)
    worker.land(worker.grants()[0])
    worker.start_pass()
    assert [new.sampling.seed for new in worker.announced.values()] == [None] * NUM_CHOICES


# From one prompt to several sequences


@pytest.mark.parametrize("num_tokens", [8, 9])
def test_landed_prompt_is_shared_by_all_choices_at_once(worker: DecodeRoleSide, num_tokens: int) -> None:
    worker.generate(num_tokens=num_tokens, num_choices=NUM_CHOICES)
    (grant,) = worker.grants()
    worker.land(grant)
    batch = worker.start_pass()
    assert [(chunk.start, chunk.token_ids) for chunk in batch.chunks] == [
        (num_tokens - 1, (num_tokens - 1,))
    ] * NUM_CHOICES
    num_full = (num_tokens - 1) // 4
    assert {chunk.page_indices[:num_full] for chunk in batch.chunks} == {grant.page_indices[:num_full]}
    assert len({chunk.page_indices[num_full] for chunk in batch.chunks}) == NUM_CHOICES
    num_copies = NUM_CHOICES - 1 if num_tokens == 8 else 0
    assert [copy.source for copy in batch.copies] == [grant.page_indices[1]] * num_copies


def test_local_prompt_is_shared_when_the_first_choice_has_its_first_token(worker: DecodeRoleSide) -> None:
    request_id = worker.generate(prefill=None, num_choices=NUM_CHOICES)
    (first,) = worker.start_pass().chunks
    worker.end_pass(0)
    others = [chunk for chunk in worker.start_pass().chunks if chunk.sequence_id != first.sequence_id]
    assert [(chunk.start, chunk.page_indices[0]) for chunk in others] == [(7, first.page_indices[0])] * 2
    worker.end_pass(1)
    assert [worker.text(request_id, index) for index in range(NUM_CHOICES)] == ["ab", "b", "b"]


def test_local_prompt_whose_first_choice_ends_at_once_is_still_shared(worker: DecodeRoleSide) -> None:
    request_id = worker.generate(prefill=None, num_choices=NUM_CHOICES)
    worker.sample(".")
    assert worker.reasons(request_id) == {0: FinishReason.STOP}
    worker.sample("abcd")
    assert [worker.text(request_id, index) for index in range(NUM_CHOICES)] == ["", "abcd", "abcd"]
    assert worker.is_idle()


def test_prompt_of_one_token_is_computed_for_each_choice_by_itself(worker: DecodeRoleSide) -> None:
    request_id = worker.generate(num_tokens=1, num_choices=4)
    assert worker.grants() == []
    batch = worker.start_pass()
    assert [chunk.start for chunk in batch.chunks] == [0] * 4
    assert len({chunk.page_indices for chunk in batch.chunks}) == 4
    worker.end_pass(0)
    worker.sample("bcd")
    assert [worker.text(request_id, index) for index in range(4)] == ["abcd"] * 4
    assert worker.is_idle()


# The ends of choices and of their request


def test_choices_end_one_by_one_and_the_request_with_the_last(worker: DecodeRoleSide) -> None:
    request_id = worker.generate(num_tokens=9, num_choices=NUM_CHOICES, sampling=SamplingParams(max_tokens=3, seed=0))
    worker.land(worker.grants()[0])
    answer_of = by_seed({0: "ab.", 1: ".", 2: "xyz"})
    num_free: list[int] = []
    for _ in range(3):
        worker.run_pass(answer_of)
        num_free.append(worker.side.pool.num_free)
        worker.advance()
    assert worker.reasons(request_id) == {0: FinishReason.STOP, 1: FinishReason.STOP, 2: FinishReason.LENGTH}
    assert [worker.text(request_id, index) for index in range(NUM_CHOICES)] == ["ab", "", "xyz"]
    assert num_free == [12, 12, 16]  # two shared pages and one for each choice that goes on
    (ended,) = worker.role.take_ended()
    assert Instant.FINISHED in ended.instants.times_ns
    assert worker.is_idle()


@pytest.mark.parametrize("ending", ["abort", "timeout", "stop", "lost gateway"])
@pytest.mark.parametrize("phase", ["pending", "handoff", "landed", "pass", "between", "one finished"])
@pytest.mark.parametrize("keeps_tails", [True, False])
def test_ending_gives_everything_of_all_choices_back_once(ending: str, phase: str, *, keeps_tails: bool) -> None:
    worker = DecodeRoleSide(keeps_tails=keeps_tails)
    if phase == "pending":
        worker.generate("first", num_tokens=36)
    request_id = worker.generate(
        num_tokens=36 if phase == "pending" else 8,
        num_choices=NUM_CHOICES,
        timeout_s=2.0,
        sampling=SamplingParams(max_tokens=4, seed=0),
    )
    reach(worker, phase)
    end(worker, ending)
    worker.listen()
    if phase == "pass":
        worker.end_pass(0)
    if phase == "handoff":
        worker.side.stopped(worker.grants()[0])
    worker.advance()
    ended = [request.request_id for request in worker.role.take_ended()]
    assert ended.count(request_id) == 1
    failures = [failed for failed in worker.failed if failed.request_id == request_id]
    assert len(failures) == (ending in ("timeout", "stop"))
    if phase == "pending":
        worker.role.on_abort(RequestId("first"), now_ns=0)
        worker.side.stopped(worker.grants()[0])
        worker.advance()
    assert worker.is_idle()


def reach(worker: DecodeRoleSide, phase: str) -> None:
    if phase not in ("pending", "handoff"):
        worker.side.all_land(worker.grants()[0])
    match phase:
        case "pass":
            worker.advance()
            worker.start_pass()
        case "between":
            worker.advance()
            worker.sample("a")
        case "one finished":
            worker.advance()
            worker.run_pass(by_seed({0: "abcd", 1: ".", 2: "abcd"}))
            assert list(worker.reasons(RequestId("request"))) == [1]
        case _:
            pass


def end(worker: DecodeRoleSide, ending: str) -> None:
    role = worker.role
    match ending:
        case "abort":
            role.on_abort(RequestId("request"), now_ns=0)
        case "timeout":
            role.on_time(2 * NS_PER_S)
        case "stop":
            role.fail_all(FailureKind.SHUTTING_DOWN, "the worker stops", now_ns=0)
        case _:
            role.abort_all(now_ns=0)


def test_abort_in_a_pass_after_one_choice_finished_counts_each_page_once(worker: DecodeRoleSide) -> None:
    request_id = worker.generate(num_choices=NUM_CHOICES, sampling=SamplingParams(max_tokens=4, seed=0))
    worker.land(worker.grants()[0])
    worker.run_pass(by_seed({0: ".", 1: "abcd", 2: "abcd"}))
    worker.start_pass()
    worker.role.on_abort(request_id, now_ns=0)
    assert not worker.side.is_whole()
    worker.end_pass(0)
    assert worker.is_idle()


def test_abort_of_a_local_prompt_before_the_other_choices_began_leaves_nothing(worker: DecodeRoleSide) -> None:
    request_id = worker.generate(prefill=None, num_choices=NUM_CHOICES)
    worker.start_pass()
    worker.role.on_abort(request_id, now_ns=0)
    worker.end_pass(0)
    assert worker.is_idle()
    assert worker.role.num_open == 0
    assert worker.deltas == []


@pytest.mark.parametrize("is_remote", [True, False])
@pytest.mark.parametrize("guess", ["", "+", "zz"])
@pytest.mark.parametrize(
    ("limits", "answer", "text", "reason"),
    [
        ({"max_tokens": 1}, "ab", "a", FinishReason.LENGTH),
        ({"max_tokens": 4}, ".abcd", "", FinishReason.STOP),
        ({"max_tokens": 4, "stop": ("a",)}, "abcdefg", "", FinishReason.STOP),
        ({"max_tokens": 4, "stop_token_ids": (0,)}, "abcdefg", "", FinishReason.STOP),
    ],
)
def test_answer_that_ends_with_its_first_token_takes_one_decode_step(
    *,
    is_remote: bool,
    guess: str,
    limits: dict[str, Any],
    answer: str,
    text: str,
    reason: FinishReason,
) -> None:
    worker = DecodeRoleSide()
    request_id = worker.generate(
        num_choices=NUM_CHOICES,
        prefill=PREFILL_TARGET if is_remote else None,
        sampling=SamplingParams(**limits),
    )
    for grant in worker.grants():
        worker.land(grant)
    num_passes = 1 if is_remote else 2  # the other choices begin when the local prompt is computed
    for _ in range(num_passes):
        assert request_id not in worker.finished
        worker.run_pass(lambda _: answer, guess=guess)
    assert worker.reasons(request_id) == dict.fromkeys(range(NUM_CHOICES), reason)
    assert [worker.text(request_id, index) for index in range(NUM_CHOICES)] == [text] * NUM_CHOICES
    assert [len(worker.tokens(request_id, index)) for index in range(NUM_CHOICES)] == [1] * NUM_CHOICES
    assert worker.is_idle()


def test_tokens_after_the_end_in_the_first_step_are_left_out() -> None:
    """The prompt repeats itself, so that n-grams guess already in the first pass after the handoff."""
    worker = DecodeRoleSide(speculation=Speculation(drafter=Drafter.NGRAM))
    sampling = SamplingParams(max_tokens=9, stop=("c",), num_top_logprobs=1)
    request_id = worker.generate(prompt="abcdabcdab", num_choices=NUM_CHOICES, sampling=sampling)
    worker.land(worker.grants()[0])
    batch = worker.start_pass()
    assert all(chunk.num_drafts > 1 for chunk in batch.chunks)
    worker.end_pass_as_guessed()
    assert worker.reasons(request_id) == dict.fromkeys(range(NUM_CHOICES), FinishReason.STOP)
    assert [worker.tokens(request_id, index) for index in range(NUM_CHOICES)] == [[2]] * NUM_CHOICES
    assert worker.reported[request_id] == []
    assert worker.is_idle()


# Bounds


@pytest.mark.parametrize("num_choices", [0, -1, MAX_CHOICES + 1])
def test_number_of_choices_out_of_range_is_impossible(num_choices: int) -> None:
    generate = Generate(
        request_id=RequestId("request"),
        receiver=Incarnation(1),
        dp_rank=0,
        prompt_token_ids=(1, 2),
        sampling=SamplingParams(max_tokens=1),
        num_choices=num_choices,
        prefill=None,
        timeout_s=1.0,
    )
    problem = why_impossible(generate, DecodeLimits(max_model_len=40), num_kv_tokens=64)
    assert problem == f"{num_choices} choices are outside [1, {MAX_CHOICES}]"


def test_more_choices_than_the_worker_ever_runs_are_refused_as_invalid() -> None:
    worker = DecodeRoleSide(max_sequences=2)
    worker.generate(num_choices=3)
    assert worker.failures() == [FailureKind.INVALID]
    assert worker.is_idle()


def test_choices_over_the_bound_are_refused_until_others_have_finished() -> None:
    worker = DecodeRoleSide(max_sequences=4)
    first = worker.generate("first", num_choices=NUM_CHOICES, sampling=SamplingParams(max_tokens=4, seed=0))
    worker.generate("second", num_choices=2)
    (refused,) = worker.failed
    assert (refused.request_id, refused.kind) == ("second", FailureKind.CAPACITY)
    assert refused.retry_after_s is not None
    worker.land(worker.grants()[0])
    worker.run_pass(by_seed({0: "abcd", 1: ".", 2: "abcd"}))
    worker.generate("third", num_choices=2, prefill=None)
    assert worker.role.num_open == 2
    worker.role.on_abort(first, now_ns=0)
    assert len(worker.failed) == 1


# Tails


def test_all_choices_begin_with_the_tail_and_it_is_kept_until_the_request_ends() -> None:
    worker = DecodeRoleSide(DecodeSide(num_tail_slots=1), keeps_tails=True)
    worker.generate(num_choices=NUM_CHOICES, sampling=SamplingParams(max_tokens=2))
    (grant,) = worker.grants()
    worker.land(grant)
    assert [chunk.carry_slot for chunk in worker.start_pass().chunks] == [grant.tail_slot] * NUM_CHOICES
    worker.end_pass(0)
    worker.generate("next")
    assert len(worker.grants()) == 1  # it waits for the only tail slot
    assert [chunk.carry_slot for chunk in worker.start_pass().chunks] == [None] * NUM_CHOICES
    worker.end_pass(0)
    assert [grant.request_id for grant in worker.grants()] == ["request", "next"]


def test_tail_that_a_pass_may_read_is_kept_until_the_pass_has_ended() -> None:
    worker = DecodeRoleSide(DecodeSide(num_tail_slots=1), keeps_tails=True)
    request_id = worker.generate(num_choices=NUM_CHOICES)
    worker.land(worker.grants()[0])
    worker.start_pass()
    worker.role.on_abort(request_id, now_ns=0)
    worker.generate("next")
    assert len(worker.grants()) == 1
    worker.end_pass(0)
    assert len(worker.grants()) == 2


def test_tail_that_nobody_reads_is_given_back_at_the_landing() -> None:
    worker = DecodeRoleSide(DecodeSide(num_tail_slots=1))
    worker.generate()
    worker.land(worker.grants()[0])
    (chunk,) = worker.start_pass().chunks
    assert chunk.carry_slot is None
    worker.generate("next")
    assert len(worker.grants()) == 2


def test_local_prompt_has_no_tail() -> None:
    worker = DecodeRoleSide(keeps_tails=True)
    worker.generate(prefill=None, num_choices=NUM_CHOICES)
    for _ in range(2):
        assert {chunk.carry_slot for chunk in worker.start_pass().chunks} == {None}
        worker.end_pass(0)
