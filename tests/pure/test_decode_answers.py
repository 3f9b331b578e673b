"""The decode role: what ends an answer, and what of it goes out."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.pure.decode_role_side import DecodeRoleSide
from tests.pure.toy_tokenizer import EOS, EOS_TEXT

from pdserve.decode.deltas import split_deltas
from pdserve.ids import RequestId
from pdserve.sampling import SamplingParams, TokenLogprobs
from pdserve.wire.cluster import Delta, FinishReason, PrefillPlace, TokenEntry


def delta_of(num_entries: int, *, of_prompt: bool) -> Delta:
    logprobs = TokenLogprobs(token_id=0, logprob=0.0, top=())
    entry = TokenEntry(text_offset=0, logprobs=logprobs)
    return Delta(
        request_id=RequestId("request"),
        token_ids=() if of_prompt else (0,),
        text="",
        entries=() if of_prompt else (entry,) * num_entries,
        prompt_logprobs=(logprobs,) * num_entries if of_prompt else (),
    )


@given(nums_entries=st.lists(st.tuples(st.integers(0, 6), st.booleans()), max_size=12))
def test_deltas_with_many_entries_go_in_several_parts(nums_entries: list[tuple[int, bool]]) -> None:
    deltas = [delta_of(num_entries, of_prompt=of_prompt) for num_entries, of_prompt in nums_entries]
    parts = split_deltas(deltas, max_entries=5)
    assert [delta for part in parts for delta in part] == deltas
    sizes = [[len(delta.entries) + len(delta.prompt_logprobs) for delta in part] for part in parts]
    assert all(sum(part) <= 5 or len(part) == 1 for part in sizes)
    assert all(sum(part) + following[0] > 5 for part, following in pairwise(sizes))


@pytest.fixture
def worker() -> DecodeRoleSide:
    return DecodeRoleSide()


def test_answer_ends_at_max_tokens(worker: DecodeRoleSide) -> None:
    request_id = worker.generate()
    worker.land(worker.grants()[0])
    worker.sample("abcd")
    assert worker.finished == {request_id: FinishReason.LENGTH}
    assert worker.texts[request_id] == "abcd"
    assert worker.is_idle()


def test_answer_of_one_token_ends_with_the_first_pass(worker: DecodeRoleSide) -> None:
    request_id = worker.generate(sampling=SamplingParams(max_tokens=1))
    worker.land(worker.grants()[0])
    worker.sample("z")
    assert worker.finished == {request_id: FinishReason.LENGTH}
    assert worker.is_idle()


def test_answer_ends_at_the_end_token_without_its_text(worker: DecodeRoleSide) -> None:
    request_id = worker.generate()
    worker.land(worker.grants()[0])
    worker.sample("ab.")
    assert worker.finished == {request_id: FinishReason.STOP}
    assert worker.texts[request_id] == "ab"
    assert worker.is_idle()


def test_end_token_as_the_first_token_ends_an_empty_answer(worker: DecodeRoleSide) -> None:
    request_id = worker.generate()
    worker.land(worker.grants()[0])
    worker.sample(".")
    assert worker.finished == {request_id: FinishReason.STOP}
    assert worker.texts[request_id] == ""
    assert worker.places == {request_id: PrefillPlace.REMOTE}


def test_end_token_that_is_ignored_counts_as_a_token(worker: DecodeRoleSide) -> None:
    request_id = worker.generate(sampling=SamplingParams(max_tokens=3, ignore_eos=True))
    worker.land(worker.grants()[0])
    worker.sample("a.b")
    assert worker.finished == {request_id: FinishReason.LENGTH}
    assert worker.texts[request_id] == "ab"


def test_answer_ends_at_a_stop_token(worker: DecodeRoleSide) -> None:
    request_id = worker.generate(sampling=SamplingParams(max_tokens=9, stop_token_ids=(2,), ignore_eos=True))
    worker.land(worker.grants()[0])
    worker.sample("abc")
    assert worker.finished == {request_id: FinishReason.STOP}
    assert worker.texts[request_id] == "ab"


def test_answer_ends_before_a_stop_string_over_several_tokens(worker: DecodeRoleSide) -> None:
    request_id = worker.generate(sampling=SamplingParams(max_tokens=9, stop=("cde",)))
    worker.land(worker.grants()[0])
    worker.sample("abcd")
    assert worker.texts[request_id] == "ab"  # "cd" may become the stop string
    worker.sample("e")
    assert worker.finished == {request_id: FinishReason.STOP}
    assert worker.texts[request_id] == "ab"
    assert worker.is_idle()


def test_text_held_back_for_a_stop_string_goes_out_at_the_end(worker: DecodeRoleSide) -> None:
    request_id = worker.generate(sampling=SamplingParams(max_tokens=4, stop=("cdx",)))
    worker.land(worker.grants()[0])
    worker.sample("abcd")
    assert worker.texts[request_id] == "abcd"


@pytest.mark.parametrize("stop", [{"stop": ("cc",)}, {"stop_token_ids": (2,)}])
def test_answer_does_not_end_before_min_tokens(worker: DecodeRoleSide, stop: dict[str, Any]) -> None:
    request_id = worker.generate(sampling=SamplingParams(max_tokens=9, min_tokens=3, **stop))
    worker.land(worker.grants()[0])
    worker.sample("accb")
    assert worker.finished == {}
    worker.sample("c" if "stop_token_ids" in stop else "cc")
    assert worker.finished == {request_id: FinishReason.STOP}
    assert worker.texts[request_id] == "accb"


def test_stop_string_that_min_tokens_cuts_ends_the_answer_where_it_begins(worker: DecodeRoleSide) -> None:
    request_id = worker.generate(sampling=SamplingParams(max_tokens=9, min_tokens=2, stop=("bc",)))
    worker.land(worker.grants()[0])
    worker.sample("abc")
    assert worker.finished == {request_id: FinishReason.STOP}
    assert worker.texts[request_id] == "a"


def test_engine_is_told_of_everything_that_ends_the_answer(worker: DecodeRoleSide) -> None:
    for name, ignore_eos in (("ends", False), ("ignores", True)):
        sampling = SamplingParams(max_tokens=3, stop_token_ids=(2,), ignore_eos=ignore_eos)
        worker.generate(name, prefill=None, sampling=sampling)
    batch = worker.scheduler.next_batch(0)
    assert batch is not None
    ends, ignores = (new.sampling.stop_token_ids for new in batch.new_sequences)
    assert (ends, ignores) == ((2, EOS), (2,))


@pytest.mark.parametrize(("letters", "stop", "num_reported"), [("abc.", (), 3), ("abcd", (), 4), ("abcd", ("cd",), 2)])
def test_logprobs_are_those_of_the_tokens_of_the_text(
    worker: DecodeRoleSide, letters: str, stop: tuple[str, ...], num_reported: int
) -> None:
    request_id = worker.generate(sampling=SamplingParams(max_tokens=4, stop=stop, num_top_logprobs=1))
    worker.land(worker.grants()[0])
    worker.sample(letters)
    assert request_id in worker.finished
    assert worker.reported[request_id] == list(range(num_reported))


# Several tokens of one step


def test_tokens_of_a_step_go_out_as_one_delta(worker: DecodeRoleSide) -> None:
    request_id = worker.generate(sampling=SamplingParams(max_tokens=9, num_top_logprobs=1))
    worker.land(worker.grants()[0])
    worker.run_pass(lambda _: "abcdefghi", guess="+++")
    worker.run_pass(lambda _: "abcdefghi", guess="+++")
    assert [delta.token_ids for delta in worker.deltas] == [(0,), (1, 2, 3, 4)]
    assert [delta.text for delta in worker.deltas] == ["a", "bcde"]
    assert [entry.text_offset for entry in worker.deltas[1].entries] == [1, 2, 3, 4]
    assert worker.reported[request_id] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("sampling", "num_tokens", "text", "num_reported"),
    [
        ({"stop": ("cd",)}, 4, "ab", 2),
        ({"stop": ("bc",)}, 3, "a", 1),
        ({"stop_token_ids": (2,)}, 3, "ab", 2),
        ({"stop_token_ids": (2,), "min_tokens": 3}, 6, "abcdef", 6),
        ({"stop": ("bc",), "min_tokens": 3}, 6, "abcdef", 6),
        ({}, 6, "abcdef", 6),
    ],
)
def test_answer_that_ends_within_a_step_leaves_out_the_tokens_after(
    worker: DecodeRoleSide, sampling: dict[str, Any], num_tokens: int, text: str, num_reported: int
) -> None:
    """The engine's sampler knows stop tokens, but no stop strings: what it draws after one is nobody's."""
    request_id = worker.generate(sampling=SamplingParams(max_tokens=6, num_top_logprobs=0, **sampling))
    worker.land(worker.grants()[0])
    while request_id not in worker.finished:
        worker.run_pass(lambda _: "abcdefghijkl", guess="+++++")
    assert worker.tokens(request_id) == list(range(num_tokens))
    assert worker.text(request_id) == text
    assert worker.reported[request_id] == list(range(num_reported))
    assert worker.is_idle()


def test_special_tokens_are_text_where_they_are_not_skipped(worker: DecodeRoleSide) -> None:
    sampling = SamplingParams(max_tokens=4, ignore_eos=True, skip_special_tokens=False)
    request_id = worker.generate(sampling=sampling)
    worker.land(worker.grants()[0])
    worker.sample("a..b")
    assert worker.texts[request_id] == f"a{EOS_TEXT}{EOS_TEXT}b"


def test_special_token_that_ends_the_answer_is_no_text(worker: DecodeRoleSide) -> None:
    request_id = worker.generate(sampling=SamplingParams(max_tokens=4, skip_special_tokens=False))
    worker.land(worker.grants()[0])
    worker.sample("ab.")
    assert worker.texts[request_id] == "ab"
