"""The search for a capacity, on systems whose capacity is known."""

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from pdserve.bench.load.capacity import ATTAINMENT_AIM, ENOUGH_RATIO, MAX_STEPS, Capacity, find_capacity


def search(capacity_per_s: float, *, first_rate_per_s: float, num_answers: int = MAX_STEPS) -> Capacity:
    """With a system that meets the objective for all requests up to its capacity, and for half of them beyond it."""
    tried: list[float] = []

    async def attainment_at(rate_per_s: float) -> float | None:
        tried.append(rate_per_s)
        if len(tried) > num_answers:
            return None
        return ATTAINMENT_AIM if rate_per_s <= capacity_per_s else 0.5

    found = asyncio.run(find_capacity(attainment_at, first_rate_per_s=first_rate_per_s))
    assert [step.rate_per_s for step in found.steps] == tried[:num_answers]
    return found


@given(st.floats(0.1, 10), st.floats(0.2, 5))
def test_capacity_near_the_first_rate_is_found_within_the_steps(capacity: float, factor: float) -> None:
    found = search(capacity, first_rate_per_s=factor * capacity)
    assert found.rate_per_s is not None and found.too_much_per_s is not None
    assert found.rate_per_s <= capacity < found.too_much_per_s <= ENOUGH_RATIO * found.rate_per_s
    assert len(found.steps) <= MAX_STEPS


def test_capacity_that_no_rate_meets_is_none_after_the_last_step() -> None:
    found = search(0.0, first_rate_per_s=8.0)
    assert (found.rate_per_s, found.too_much_per_s) == (None, 8.0 / 2 ** (MAX_STEPS - 1))


def test_capacity_beyond_all_that_was_tried_is_said_to_be_larger() -> None:
    found = search(1e9, first_rate_per_s=1.0)
    assert (found.rate_per_s, found.too_much_per_s) == (2.0 ** (MAX_STEPS - 1), None)


def test_capacity_search_cut_short_keeps_what_it_found() -> None:
    found = search(1e9, first_rate_per_s=1.0, num_answers=2)
    assert (found.rate_per_s, len(found.steps)) == (2.0, 2)


@given(st.lists(st.sampled_from([0.5, ATTAINMENT_AIM]), min_size=MAX_STEPS, max_size=MAX_STEPS))
def test_capacity_of_a_system_of_any_mood_is_under_all_that_failed(attainments: list[float]) -> None:
    moods = iter(attainments)

    async def attainment_at(rate_per_s: float) -> float:
        return next(moods)

    found = asyncio.run(find_capacity(attainment_at, first_rate_per_s=4.0))
    met = [step.rate_per_s for step in found.steps if step.attainment == ATTAINMENT_AIM]
    failed = [step.rate_per_s for step in found.steps if step.attainment == 0.5]
    assert (found.rate_per_s, found.too_much_per_s) == (max(met, default=None), min(failed, default=None))
    assert not met or not failed or max(met) < min(failed)
