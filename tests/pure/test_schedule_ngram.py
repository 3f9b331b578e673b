"""Guesses from n-grams against their definition."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.schedule.ngram import MAX_CAUGHT_UP_TOKENS, NgramIndex

FEW_TOKENS = st.lists(st.integers(0, 2), max_size=40)


def by_definition(token_ids: list[int], *, num_tokens: int) -> tuple[int, ...]:
    for length, num_guesses in [(4, num_tokens), (3, -(-num_tokens // 2)), (2, 1)]:
        pattern = token_ids[len(token_ids) - length :]
        for start in reversed(range(len(token_ids) - length)):
            if token_ids[start : start + length] == pattern:
                copied = list(token_ids)
                for ahead in range(num_guesses):
                    copied.append(copied[start + length + ahead])
                return tuple(copied[len(token_ids) :])
    return ()


@given(parts=st.lists(FEW_TOKENS, min_size=1, max_size=5), num_tokens=st.integers(1, 9))
def test_ngram_guesses_are_what_followed_the_longest_latest_match(parts: list[list[int]], num_tokens: int) -> None:
    index = NgramIndex()
    token_ids = [0]
    for part in parts:
        token_ids += part
        assert index.propose(token_ids, num_tokens=num_tokens) == by_definition(token_ids, num_tokens=num_tokens)


@given(token_ids=FEW_TOKENS.filter(bool), num_tokens=st.integers(1, 9))
def test_ngram_guesses_do_not_depend_on_when_the_index_was_asked(token_ids: list[int], num_tokens: int) -> None:
    asked_often = NgramIndex()
    for stop in range(1, len(token_ids)):
        asked_often.propose(token_ids[:stop], num_tokens=2)
    assert asked_often.propose(token_ids, num_tokens=num_tokens) == NgramIndex().propose(
        token_ids, num_tokens=num_tokens
    )


@pytest.mark.parametrize(
    ("token_ids", "guesses"),
    [
        ([1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3, 4], (5, 6, 7, 8)),
        ([1, 2, 3, 5, 6, 7, 9, 1, 2, 3], (5, 6)),
        ([2, 3, 5, 6, 9, 2, 3], (5,)),
        ([3, 5, 6, 9, 3], ()),
        ([1, 2, 3, 4, 5, 9, 1, 2, 3, 4, 6, 9, 1, 2, 3, 4], (6, 9, 1, 2)),
        ([7, 7, 7, 7, 7], (7, 7, 7, 7)),
        ([0, 0], ()),
        ([2**32 - 2, 1, 5, 2**32 - 2, 1], (5,)),
    ],
)
def test_ngram_guesses_are_fewer_after_a_shorter_match(token_ids: list[int], guesses: tuple[int, ...]) -> None:
    assert NgramIndex().propose(token_ids, num_tokens=4) == guesses


def test_ngram_index_catches_up_with_a_long_prompt_over_several_calls() -> None:
    index = NgramIndex()
    token_ids = [*range(2 * MAX_CAUGHT_UP_TOKENS), 1, 2]
    proposals = [index.propose(token_ids, num_tokens=4) for _ in range(3)]
    assert proposals == [(), (), (3,)]
