"""The decode role: an answer that another worker began goes on as if that one had not been lost."""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.pure.decode_role_side import PREFILL_TARGET, AnswerOf, DecodeRoleSide, token_of
from tests.pure.decode_side import DecodeSide
from tests.pure.toy_tokenizer import EOS, LETTERS, LetterCore

from pdserve.decode.request import LocalReason
from pdserve.gateway.progress import Progress
from pdserve.sampling import SamplingParams, TokenLogprobs
from pdserve.text.tokenizer import Tokenizer
from pdserve.wire.cluster import Delta, FailureKind, FinishReason, PrefillPlace, TokenEntry, Told

EURO = dict(zip("xyz", (b"\xe2", b"\x82", b"\xac"), strict=True))
"""Letters that are one byte each of a character of three."""

NUM_TURNS = 300


class EuroCore(LetterCore):
    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        del skip_special_tokens
        letters = [LETTERS[token_id] for token_id in ids if token_id != EOS]
        return b"".join(EURO.get(letter, letter.encode()) for letter in letters).decode(errors="replace")


def euro_tokenizer() -> Tokenizer:
    return Tokenizer(EuroCore(), eos_token_ids=frozenset({EOS}))


def run_to_end(worker: DecodeRoleSide, answer_of: AnswerOf, guesses: Sequence[str]) -> None:
    num_landed = 0
    for turn in range(NUM_TURNS):
        for grant in worker.grants()[num_landed:]:
            worker.land(grant)
            num_landed += 1
        if not worker.role.num_open:
            return
        worker.run_pass(answer_of, guess=guesses[turn % len(guesses)])
    pytest.fail("the answer does not end")


def progress_of(deltas: Sequence[Delta], *, num_choices: int) -> Progress:
    """What a gateway knows after these."""
    progress = Progress(num_choices=num_choices)
    for delta in deltas:
        assert progress.accepts(delta)
        progress.add(delta)
    return progress


ChoiceParts = tuple[list[int], str, list[TokenEntry], FinishReason | None]


def parts_of(deltas: Sequence[Delta], choice_index: int) -> ChoiceParts:
    """What the client puts together of a choice."""
    mine = [delta for delta in deltas if delta.choice_index == choice_index]
    return (
        [token_id for delta in mine for token_id in delta.token_ids],
        "".join(delta.text for delta in mine),
        [entry for delta in mine for entry in delta.entries],
        mine[-1].finish_reason if mine else None,
    )


def prompt_logprobs_of(deltas: Sequence[Delta]) -> list[TokenLogprobs]:
    return [entry for delta in deltas for entry in delta.prompt_logprobs]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A request, and a worker to be that gets it."""

    answers: list[str]
    """What an engine draws, by seed."""
    stop: list[str]
    max_tokens: int
    min_tokens: int
    num_tokens: int
    has_logprobs: bool
    has_prompt_logprobs: bool
    ignore_eos: bool
    is_remote: bool
    num_pages: int
    guesses: list[str]

    @property
    def num_choices(self) -> int:
        return len(self.answers)

    def deltas_after(self, progress: Progress) -> list[Delta]:
        """Of a worker that is new to the request."""
        worker = DecodeRoleSide(
            DecodeSide(num_pages=self.num_pages),
            max_batch_tokens=5,
            tokenizer=euro_tokenizer(),
            keeps_tails=self.is_remote,
        )
        worker.generate(
            num_tokens=self.num_tokens,
            num_choices=self.num_choices,
            prefill=PREFILL_TARGET if self.is_remote else None,
            sampling=self._sampling,
            told=progress.told(),
            num_prompt_logprobs_told=progress.num_prompt_logprobs,
        )
        run_to_end(worker, self._answer_of, self.guesses)
        assert worker.failed == []
        assert worker.is_idle()
        return worker.deltas

    @property
    def _sampling(self) -> SamplingParams:
        return SamplingParams(
            max_tokens=self.max_tokens,
            min_tokens=min(self.min_tokens, self.max_tokens),
            seed=0,
            stop=tuple(self.stop),
            ignore_eos=self.ignore_eos,
            num_top_logprobs=1 if self.has_logprobs else None,
            num_prompt_logprobs=0 if self.has_prompt_logprobs else None,
        )

    def _answer_of(self, sampling: SamplingParams) -> str:
        assert sampling.seed is not None
        return self.answers[sampling.seed] + "a" * 10


CASES = st.builds(
    Case,
    answers=st.lists(st.text("abxyz.", min_size=10, max_size=10), min_size=1, max_size=3),
    stop=st.lists(st.text("ab\u20ac", min_size=1, max_size=4), max_size=2),
    max_tokens=st.integers(1, 10),
    min_tokens=st.integers(0, 4),
    num_tokens=st.integers(1, 9),
    num_pages=st.sampled_from([6, 40]),
    guesses=st.lists(st.sampled_from(["", "+", "+++", "zz"]), min_size=1, max_size=3),
)


@given(case=CASES, cuts=st.lists(st.floats(0, 1, exclude_max=True), min_size=1, max_size=2))
def test_answer_cut_anywhere_and_resumed_elsewhere_is_the_uncut_one(case: Case, cuts: list[float]) -> None:
    uncut = case.deltas_after(Progress(num_choices=case.num_choices))
    deltas = uncut
    for cut in cuts:
        before = deltas[: int(cut * len(deltas))]
        deltas = before + case.deltas_after(progress_of(before, num_choices=case.num_choices))
    for choice_index in range(case.num_choices):
        assert parts_of(deltas, choice_index) == parts_of(uncut, choice_index)
    assert prompt_logprobs_of(deltas) == prompt_logprobs_of(uncut)
    assert all(delta.token_ids or delta.prompt_logprobs for delta in deltas)


def told(letters: str, *, num_entries: int = 0, num_text_chars: int | None = None) -> Told:
    return Told(
        token_ids=tuple(map(token_of, letters)),
        num_text_chars=len(letters) if num_text_chars is None else num_text_chars,
        num_entries=num_entries,
    )


FINISHED = Told(is_finished=True)


def test_one_answer_that_resumes_is_handed_over_with_the_tokens_it_keeps() -> None:
    worker = DecodeRoleSide()
    request_id = worker.generate(prompt="hello", told=(told("ab"),), sampling=SamplingParams(max_tokens=4))
    (grant,) = worker.grants()
    assert grant.token_ids == tuple(map(token_of, "helloab"))
    worker.land(grant)
    (chunk,) = worker.start_pass().chunks
    assert (chunk.start, chunk.token_ids) == (6, (token_of("b"),))
    (new,) = worker.announced.values()
    assert (new.prompt_token_ids, new.output_token_ids) == (tuple(map(token_of, "hello")), (0, 1))
    worker.end_pass(token_of("c"))
    worker.sample("d")
    assert (worker.text(request_id), worker.tokens(request_id)) == ("cd", [2, 3])
    assert worker.places == {request_id: PrefillPlace.REMOTE}
    assert worker.finished == {request_id: FinishReason.LENGTH}
    assert worker.is_idle()


def test_tokens_whose_logprobs_are_missing_are_generated_again_and_not_told_again() -> None:
    worker = DecodeRoleSide()
    sampling = SamplingParams(max_tokens=6, stop=("cdx",), num_top_logprobs=0)
    request_id = worker.generate(told=(told("abcd", num_text_chars=2, num_entries=2),), sampling=sampling)
    (grant,) = worker.grants()
    assert grant.token_ids[-2:] == (0, 1)
    worker.land(grant)
    worker.sample("cd")
    assert worker.deltas == []
    worker.sample("e.")
    assert (worker.text(request_id), worker.tokens(request_id)) == ("cde", [4, EOS])
    assert worker.reported[request_id] == [2, 3, 4]
    assert worker.places == {request_id: PrefillPlace.REMOTE}


def test_several_answers_that_resume_are_prefilled_here_each_by_itself() -> None:
    worker = DecodeRoleSide()
    request_id = worker.generate(
        num_choices=3, told=(told("ab"), FINISHED, told("")), sampling=SamplingParams(max_tokens=4)
    )
    assert worker.grants() == []
    chunks = worker.start_pass().chunks
    assert [(chunk.start, len(chunk.token_ids)) for chunk in chunks] == [(0, 8), (0, 10)]
    assert not set(chunks[0].page_indices) & set(chunks[1].page_indices)
    worker.end_pass(token_of("c"))
    while request_id not in worker.finished:
        worker.sample("c")
    assert [len(worker.tokens(request_id, index)) for index in range(3)] == [2, 0, 4]
    (request,) = worker.role.take_ended()
    assert request.local_reason is LocalReason.RESUMED
    assert worker.is_idle()


def test_choices_that_have_not_begun_share_the_prompt_though_the_first_has_finished() -> None:
    worker = DecodeRoleSide()
    worker.generate(num_choices=3, told=(FINISHED, Told(), Told()))
    worker.land(worker.grants()[0])
    assert [chunk.start for chunk in worker.start_pass().chunks] == [7, 7]
    worker.end_pass(0)


def test_resumed_choices_that_do_not_all_fit_the_queue_start_as_room_comes() -> None:
    """The queue of this scheduler holds two."""
    worker = DecodeRoleSide()
    request_id = worker.generate(num_choices=4, told=(told("a"),) * 4)
    assert (worker.role.num_pending, worker.role.num_pending_tokens) == (2, 2 * 9)
    while worker.role.num_open:
        worker.sample("b")
    assert [worker.text(request_id, index) for index in range(4)] == ["bbb"] * 4
    assert worker.is_idle()


@pytest.mark.parametrize("num_passes", [0, 1, 2])
def test_abort_of_choices_that_resume_leaves_nothing(num_passes: int) -> None:
    worker = DecodeRoleSide()
    request_id = worker.generate(num_choices=4, told=(told("a"),) * 4)
    for _ in range(num_passes):
        worker.sample("b")
    worker.role.on_abort(request_id, now_ns=0)
    worker.advance()
    assert worker.role.num_pending == 0
    assert worker.is_idle()


def test_finished_choices_take_no_room() -> None:
    worker = DecodeRoleSide(max_sequences=4)
    worker.generate("first", num_choices=3)
    worker.generate("second", num_choices=4, told=(FINISHED, FINISHED, told("a"), FINISHED))
    assert worker.failed == []
    assert worker.role.num_open == 2


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ((told("a"),), "1 of 2 choices"),
        ((FINISHED, FINISHED), "every choice"),
        ((FINISHED, told("abcd")), "more of a choice"),
        ((FINISHED, told("a", num_entries=2)), "more of a choice"),
        ((FINISHED, told("a", num_entries=-1)), "more of a choice"),
        ((FINISHED, told("a", num_text_chars=-1)), "more of a choice"),
    ],
)
def test_answer_that_can_not_go_on_from_what_was_told_is_refused(wrong: tuple[Told, ...], message: str) -> None:
    worker = DecodeRoleSide()
    worker.generate(num_choices=2, told=wrong)
    (failed,) = worker.failed
    assert failed.kind is FailureKind.INVALID
    assert message in failed.message
    assert worker.is_idle()
