"""Stop strings against `str.find` on the whole text, for every way to cut it."""

from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pdserve.errors import InvalidField
from pdserve.text.stops import StopMatcher

TEXTS = st.text(alphabet="ab", max_size=14)
STOPS = st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=4)


def expected_output(text: str, stops: list[str]) -> tuple[str, bool]:
    """Up to the stop string whose end comes first; of two that end together, the longer."""
    ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    return (text[: min(ends)[1]], True) if ends else (text, False)


def pieces(text: str, cuts: set[int]) -> list[str]:
    borders = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    return [text[start:stop] for start, stop in pairwise(borders)]


@given(text=TEXTS, stops=STOPS, cuts=st.sets(st.integers(0, 14)))
@example(text="aaab", stops=["aab"], cuts={1, 2, 3})
@example(text="aabaaabaaac", stops=["aabaaac"], cuts={7})
@example(text="abab", stops=["abb", "ba"], cuts=set())
def test_text_stop_output_is_that_of_the_whole_text(text: str, stops: list[str], cuts: set[int]) -> None:
    matcher = StopMatcher(stops)
    output, seen = "", ""
    found = False
    for piece in pieces(text, cuts):
        released, found = matcher.feed(piece)
        output += released
        seen += piece
        if not found:
            held = seen[len(output) :]
            longest = max((k for s in stops for k in range(len(s)) if seen.endswith(s[:k])), default=0)
            assert len(held) == longest, "held back is exactly what may become a stop string"
    output += matcher.finish()
    assert (output, found) == expected_output(text, stops)


@given(text=TEXTS, stops=STOPS, num_exempt=st.integers(0, 14))
@example(text="aaa", stops=["aa"], num_exempt=2)
def test_text_stop_complete_where_it_may_not_stop_is_text(text: str, stops: list[str], num_exempt: int) -> None:
    matcher = StopMatcher(stops)
    exempt, _ = matcher.feed(text[:num_exempt], may_stop=False)
    rest, found = matcher.feed(text[num_exempt:])
    ends = [(end, -len(s)) for end in range(num_exempt + 1, len(text) + 1) for s in stops if text[:end].endswith(s)]
    expected = text[: sum(min(ends))] if ends else text
    assert (exempt + rest + matcher.finish(), found) == (expected, bool(ends))


def test_text_stop_once_found_gives_nothing_more() -> None:
    matcher = StopMatcher(["END"])
    assert matcher.feed("the E") == ("the ", False)
    assert matcher.feed("ND of it") == ("", True)
    assert matcher.feed("more") == ("", True)
    assert matcher.finish() == ""


def test_text_without_stop_strings_passes_through() -> None:
    matcher = StopMatcher([])
    assert matcher.feed("abc") == ("abc", False)
    assert matcher.finish() == ""


def test_text_stop_that_is_empty_is_refused() -> None:
    with pytest.raises(InvalidField) as caught:
        StopMatcher(["a", ""])
    assert caught.value.param == "stop"
