"""The text of an answer with the entries of its tokens, against the rules on the whole text."""

from collections.abc import Sequence

from hypothesis import example, given
from hypothesis import strategies as st
from tests.pure.toy_tokenizer import EOS, EOS_TEXT, LETTERS, letter_tokenizer

from pdserve.decode.answer_text import MAX_HELD_ENTRIES, AnswerText
from pdserve.sampling import TokenLogprobs

A, B = LETTERS.index("a"), LETTERS.index("b")


def logprobs_of(index: int, token_id: int) -> TokenLogprobs:
    """Those of the token at `index` of an answer, which tell it from the others."""
    return TokenLogprobs(token_id=token_id, logprob=float(-index), top=())


def indices_of(answer: AnswerText, texts: list[str]) -> list[int]:
    """Of the tokens whose entries go out now; their text goes to `texts`."""
    text, entries = answer.take()
    texts.append(text)
    return [round(-entry.logprobs.logprob) for entry in entries]


def expected_indices(token_ids: Sequence[int], text: str, *, is_cut: bool) -> list[int]:
    """Tokens of the letters of `text`; a special one goes with the letter before it, or with the beginning."""
    kept: list[int] = []
    num_letters = 0
    for index, token_id in enumerate(token_ids):
        num_letters += token_id != EOS
        if num_letters <= len(text) or not is_cut:
            kept.append(index)
    return kept


@given(
    token_ids=st.lists(st.sampled_from([A, B, EOS]), max_size=12),
    stop=st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=2),
)
@example(token_ids=[A, B, A, B, B], stop=["abb"])
@example(token_ids=[EOS, A, EOS, B], stop=["ab"])
def test_entries_are_those_of_the_tokens_that_have_text_in_the_answer(token_ids: list[int], stop: list[str]) -> None:
    answer = AnswerText(letter_tokenizer(), stop=tuple(stop))
    texts: list[str] = []
    kept: list[int] = []
    found_stop = False
    for index, token_id in enumerate(token_ids):
        found_stop = answer.add(token_id, logprobs_of(index, token_id), may_stop=True)
        kept += indices_of(answer, texts)
        if found_stop:
            break
    if not found_stop:
        answer.finish(may_stop=True)
        kept += indices_of(answer, texts)
    assert kept == expected_indices(token_ids, "".join(texts), is_cut=found_stop)


def test_entries_go_out_with_the_text_that_they_begin_and_say_where() -> None:
    answer = AnswerText(letter_tokenizer(), stop=("ba",))
    offsets: list[tuple[str, list[int]]] = []
    for index, token_id in enumerate([A, B, B, A]):
        answer.add(token_id, logprobs_of(index, token_id), may_stop=index < 3)
        text, entries = answer.take()
        offsets.append((text, [entry.text_offset for entry in entries]))
    assert offsets == [("a", [0]), ("", []), ("b", [1]), ("ba", [2, 3])]


def test_entries_held_back_are_bounded() -> None:
    answer = AnswerText(letter_tokenizer(), stop=("ab",))
    texts: list[str] = []
    answer.add(A, logprobs_of(0, A), may_stop=True)
    for index in range(1, MAX_HELD_ENTRIES):
        answer.add(EOS, logprobs_of(index, EOS), may_stop=True)
    assert indices_of(answer, texts) == []
    answer.add(EOS, logprobs_of(MAX_HELD_ENTRIES, EOS), may_stop=True)
    assert indices_of(answer, texts) == [0]


def test_tokens_without_logprobs_have_no_entries() -> None:
    answer = AnswerText(letter_tokenizer(), stop=())
    answer.add(A, None, may_stop=True)
    answer.finish(may_stop=True)
    assert answer.take() == ("a", ())


def test_special_token_that_is_text_has_its_entry_where_its_text_begins() -> None:
    answer = AnswerText(letter_tokenizer(), stop=(), skip_special_tokens=False)
    for index, token_id in enumerate([A, EOS, B]):
        answer.add(token_id, logprobs_of(index, token_id), may_stop=True)
    text, entries = answer.take()
    assert text == f"a{EOS_TEXT}b"
    assert [entry.text_offset for entry in entries] == [0, 1, 1 + len(EOS_TEXT)]


def test_special_token_that_is_text_can_be_a_stop_string() -> None:
    answer = AnswerText(letter_tokenizer(), stop=(EOS_TEXT,), skip_special_tokens=False)
    assert [answer.add(token_id, logprobs_of(0, token_id), may_stop=True) for token_id in [A, EOS]] == [False, True]
    text, entries = answer.take()
    assert (text, [entry.logprobs.token_id for entry in entries]) == ("a", [A])
