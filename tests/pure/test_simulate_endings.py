"""Processes that die or are told to stop, the gateway too, and what their clients are told."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from pdserve.simulate.gateway_end import GATEWAY
from pdserve.simulate.plan import Fault, FaultKind, Plan, plan_of
from pdserve.simulate.world import RETRY_MARK, World
from pdserve.units import NS_PER_MS, NS_PER_S

LONG_NS = 30 * NS_PER_S
"""Whatever a worker has is over by then."""


def endings(plan: Plan) -> dict[str, list[str]]:
    """Of each request, by name, in a world that kept every rule."""
    world = World(plan)
    try:
        assert world.run() is None
        return {client.name: client.endings for client in world.clients}
    finally:
        world.close()


def with_fault(seed: int, kind: FaultKind, target: str, *, duration_ns: int, at_ns: int = 300 * NS_PER_MS) -> Plan:
    """A calm world but for that; its clients ask once, and wait."""
    plan = plan_of(seed, with_faults=False)
    fault = Fault(at_ns=at_ns, kind=kind, target=target, other=GATEWAY, duration_ns=duration_ns)
    arrivals = tuple(
        replace(arrival, timeout_ns=LONG_NS * 2, leaves_after_ns=None, num_retries=0) for arrival in plan.arrivals
    )
    return replace(plan, faults=(fault,), arrivals=arrivals)


def seeds_with(wanted: Callable[[Plan], bool], count: int) -> list[int]:
    return [seed for seed in range(200) if wanted(plan_of(seed, with_faults=False))][:count]


def has_two_decode_workers(plan: Plan) -> bool:
    return sum(name.startswith("decode") for name, _ in plan.workers) > 1


@pytest.mark.parametrize("kind", [FaultKind.KILL, FaultKind.TERM, FaultKind.TERM_TWICE])
def test_gateway_that_ends_leaves_every_request_one_ending_and_a_successor_answers(kind: FaultKind) -> None:
    told: set[str] = set()
    for seed in range(6):
        plan = with_fault(seed, kind, GATEWAY, duration_ns=0)
        told |= {ending for one in endings(plan).values() for ending in one}
    assert {"answered"} < told <= {"answered", "broken off", "refused 429", "refused 503"}
    if kind is FaultKind.KILL:
        assert "broken off" in told


@pytest.mark.parametrize("seed", seeds_with(has_two_decode_workers, 6))
def test_decode_worker_that_drains_costs_no_request_its_answer(seed: int) -> None:
    calm = with_fault(seed, FaultKind.STALE, GATEWAY, duration_ns=0)
    drained = with_fault(seed, FaultKind.TERM, "decode-0", duration_ns=LONG_NS)
    for plan in (calm, drained):
        assert {ending for one in endings(plan).values() for ending in one} <= {"answered", "refused 429"}


def test_prefill_worker_that_drains_costs_no_request_its_answer() -> None:
    for seed in range(6):
        plan = with_fault(seed, FaultKind.TERM, "prefill-0", duration_ns=LONG_NS)
        assert {ending for one in endings(plan).values() for ending in one} <= {"answered", "refused 429"}


def test_second_signal_ends_a_worker_that_drains_at_once() -> None:
    plan = with_fault(4, FaultKind.TERM_TWICE, "decode-0", duration_ns=5 * NS_PER_MS, at_ns=250 * NS_PER_MS)
    world = World(plan)
    try:
        drained = world.workers["decode-0"]
        assert world.run() is None
        assert not drained.is_alive
        assert world.workers["decode-0"] is not drained
    finally:
        world.close()


def test_refused_client_comes_again_when_it_was_told_to() -> None:
    plan = plan_of(seeds_with(lambda plan: plan.max_pending == 8, 1)[0], with_faults=False)
    plan = replace(plan, arrivals=tuple(replace(one, at_ns=NS_PER_S, num_retries=3) for one in plan.arrivals))
    told = endings(plan)
    again = [name for name in told if RETRY_MARK in name]
    assert again
    assert all(told[name.partition(RETRY_MARK)[0]] == ["refused 429"] for name in again)
    assert any(told[name] == ["answered"] for name in again)
