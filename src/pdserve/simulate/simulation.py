"""One seed from its plan to its outcome, and the smallest plan that still breaks the same rule."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

from pdserve.simulate.plan import Plan, plan_of
from pdserve.simulate.planted import Plant, planted
from pdserve.simulate.world import Violation, World

MAX_LOG_LINES = 60
RULE_LENGTH = 2
"""Of `H2`, with which what was broken begins; other violations begin with the name of an error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    seed: int
    num_requests: int
    num_faults: int
    violation: Violation | None
    log: tuple[str, ...] = ()
    """Of a violation: what happened to the request before it, in a run with as few faults as show it."""


def simulate(seed: int, *, with_faults: bool, plant: Plant | None = None, explains: bool) -> Outcome:
    """`explains`: a violation is shown by its log, after runs with fewer and fewer faults."""
    plan = plan_of(seed, with_faults=with_faults)
    with _bug(plant):
        violation, log = run(plan)
        if violation is not None and explains:
            _, violation, log = minimise(plan, violation)
    return Outcome(
        seed=seed,
        num_requests=len(plan.arrivals),
        num_faults=len(plan.faults),
        violation=violation,
        log=log,
    )


def run(plan: Plan) -> tuple[Violation | None, tuple[str, ...]]:
    world = World(plan)
    try:
        violation = world.run()
        if violation is None:
            return None, ()
        about = world.names_of(violation.about) if violation.about else ()
        return violation, tuple(world.journal.lines(about=about, max_lines=MAX_LOG_LINES))
    finally:
        world.close()


def minimise(plan: Plan, violation: Violation) -> tuple[Plan, Violation, tuple[str, ...]]:
    """A plan without the faults and requests that are not needed to break the same rule, and what came of it."""
    for drop in (_without_fault, _without_arrival):
        index = 0
        while (smaller := drop(plan, index)) is not None:
            found, _ = run(smaller)
            if found is not None and found.rule[:RULE_LENGTH] == violation.rule[:RULE_LENGTH]:
                plan = smaller
            else:
                index += 1
    found, log = run(plan)
    return plan, found or violation, log


def _without_fault(plan: Plan, index: int) -> Plan | None:
    if index >= len(plan.faults):
        return None
    return replace(plan, faults=plan.faults[:index] + plan.faults[index + 1 :])


def _without_arrival(plan: Plan, index: int) -> Plan | None:
    if index >= len(plan.arrivals):
        return None
    return replace(plan, arrivals=plan.arrivals[:index] + plan.arrivals[index + 1 :])


def _bug(plant: Plant | None) -> AbstractContextManager[None]:
    return nullcontext() if plant is None else planted(plant)
