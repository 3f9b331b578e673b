"""What `pdserve verify-faults` says of an answer, and of all cases together."""

import pytest

from pdserve.bench.faults.asking import Answer, Ending
from pdserve.bench.faults.cases import Promise
from pdserve.bench.faults.verdict import Flaw, Result, flaw_of, is_flawless, last_line

EXPECTED = (5, 6, 7)


def answer(*token_ids: int, ending: Ending = Ending.FINISHED, code: str = "") -> Answer:
    return Answer(token_ids=token_ids, ending=ending, code=code)


@pytest.mark.parametrize(
    ("given", "promise"),
    [
        (answer(5, 6, 7), Promise.SAME),
        (answer(5, ending=Ending.LEFT), Promise.SAME),
        (answer(5, 6, 7), Promise.SAME_OR_LOST),
        (answer(5, ending=Ending.ERROR, code="worker_lost"), Promise.SAME_OR_LOST),
        (answer(ending=Ending.ERROR, code="503 worker_lost"), Promise.SAME_OR_LOST),
        (answer(5, ending=Ending.BROKEN), Promise.SAME_OR_BROKEN),
    ],
)
def test_answer_that_keeps_the_promise_has_no_flaw(given: Answer, promise: Promise) -> None:
    assert flaw_of(given, EXPECTED, promise) is None


@pytest.mark.parametrize(
    ("given", "promise"),
    [
        (answer(5, 6), Promise.SAME),
        (answer(5, 6, 8), Promise.SAME),
        (answer(5, 6, 7, 8), Promise.SAME),
        (answer(5, 6, ending=Ending.TRUNCATED), Promise.SAME_OR_BROKEN),
        (answer(5, ending=Ending.ERROR, code="worker_lost"), Promise.SAME),
        (answer(5, ending=Ending.ERROR, code="internal_error"), Promise.SAME_OR_LOST),
        (answer(8, ending=Ending.ERROR, code="worker_lost"), Promise.SAME_OR_LOST),
        (answer(8, ending=Ending.LEFT), Promise.SAME),
        (answer(5, ending=Ending.BROKEN), Promise.SAME_OR_LOST),
        (answer(8, ending=Ending.BROKEN), Promise.SAME_OR_BROKEN),
    ],
)
def test_answer_that_breaks_the_promise_is_wrong(given: Answer, promise: Promise) -> None:
    assert flaw_of(given, EXPECTED, promise) is Flaw.WRONG


def test_answer_without_an_end_has_hung() -> None:
    assert flaw_of(answer(5, ending=Ending.HUNG), EXPECTED, Promise.SAME_OR_BROKEN) is Flaw.HUNG


def test_last_line_of_flawless_cases_is_ok() -> None:
    results = [Result(name="first"), Result(name="second")]
    assert is_flawless(results)
    assert last_line(results) == "verify-faults: ok cases=2 wrong=0 hung=0 leaked=0"


def test_last_line_counts_cases_and_not_findings() -> None:
    flawed = Result(name="flawed")
    flawed.add(Flaw.LEAKED, "a page")
    flawed.add(Flaw.LEAKED, "another")
    flawed.judge("subject", answer(1), EXPECTED, Promise.SAME)
    results = [Result(name="first"), flawed]
    assert not is_flawless(results)
    assert last_line(results) == "verify-faults: FAILED cases=2 wrong=1 hung=0 leaked=1"


def test_moment_that_did_not_come_is_a_failure() -> None:
    flawed = Result(name="flawed")
    flawed.add(Flaw.UNFORCED, "the moment did not come")
    assert last_line([flawed]) == "verify-faults: FAILED cases=1 wrong=0 hung=0 leaked=0 unforced=1"


def test_no_case_at_all_is_a_failure() -> None:
    assert last_line([]) == "verify-faults: FAILED cases=0 wrong=0 hung=0 leaked=0"
