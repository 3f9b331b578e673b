"""The largest rate at which a system still meets the objective for 90% of its requests, by bisection."""

from collections.abc import Awaitable, Callable

import msgspec

ATTAINMENT_AIM = 0.9
"""Of the requests; what a rate must reach to count as within a system's capacity."""

MAX_STEPS = 10
ENOUGH_RATIO = 1.1
"""Between the least rate that was too much and the largest that was not, at which the search ends: what lies closer
together, runs of some hundred requests can't tell apart."""


class CapacityStep(msgspec.Struct, frozen=True, kw_only=True):
    rate_per_s: float
    attainment: float


class Capacity(msgspec.Struct, frozen=True, kw_only=True):
    rate_per_s: float | None
    """The largest that was tried and met the aim; None: none did."""
    too_much_per_s: float | None
    """The least that was tried and did not; None: none failed, so the capacity is larger than what was tried."""
    steps: tuple[CapacityStep, ...]


async def find_capacity(
    attainment_at: Callable[[float], Awaitable[float | None]], *, first_rate_per_s: float
) -> Capacity:
    """Double or halve the rate until the capacity lies between two, then bisect, at the geometric mean.

    `attainment_at` runs a load; None from it ends the search. At most `MAX_STEPS` loads are run.
    """
    steps: list[CapacityStep] = []
    found = _capacity(steps)
    while len(steps) < MAX_STEPS and not _is_close(found):
        rate_per_s = _next_rate(found, first_rate_per_s)
        attainment = await attainment_at(rate_per_s)
        if attainment is None:
            break
        steps.append(CapacityStep(rate_per_s=rate_per_s, attainment=attainment))
        found = _capacity(steps)
    return found


def _capacity(steps: list[CapacityStep]) -> Capacity:
    """No rate is tried over one that failed, so all that met the aim are under it."""
    met = [step.rate_per_s for step in steps if step.attainment >= ATTAINMENT_AIM]
    failed = [step.rate_per_s for step in steps if step.attainment < ATTAINMENT_AIM]
    return Capacity(rate_per_s=max(met, default=None), too_much_per_s=min(failed, default=None), steps=tuple(steps))


def _next_rate(found: Capacity, first_rate_per_s: float) -> float:
    if found.rate_per_s is not None and found.too_much_per_s is not None:
        return (found.rate_per_s * found.too_much_per_s) ** 0.5
    if found.too_much_per_s is not None:
        return found.too_much_per_s / 2
    return first_rate_per_s if found.rate_per_s is None else 2 * found.rate_per_s


def _is_close(found: Capacity) -> bool:
    if found.rate_per_s is None or found.too_much_per_s is None:
        return False
    return found.too_much_per_s <= ENOUGH_RATIO * found.rate_per_s
