"""Worlds of the simulator for tests: of a given shape and calm, or of a seed, until a planted bug is found."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import pytest

from pdserve.config.role import Role
from pdserve.simulate.model import DRAFT, GQA, MLA, PAGE_SLOTS, VOCABULARY, HashModel
from pdserve.simulate.plan import FIRST_REQUEST_NS, PATIENT_NS, Arrival, Fault, FaultKind, Plan, plan_of
from pdserve.simulate.simulation import run
from pdserve.simulate.worker import WorkerShape
from pdserve.units import NS_PER_MS, NS_PER_S

MAX_SEEDS = 1000
"""In which every planted bug must be found."""

CHUNK_TOKENS = 9
"""Of the simulator's workers."""

EDGES = [2, *(edge + more for edge in (PAGE_SLOTS, CHUNK_TOKENS, 12, 2 * CHUNK_TOKENS) for more in (-1, 0, 1, 2))]
"""Lengths of prompts at the edges of pages and chunks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How the cache is spread over ranks. A second worker of a role is sharded like the first of the other role."""

    model: HashModel
    prefill_ranks: int = 1
    decode_ranks: int = 1
    num_dp_ranks: int = 1
    """Of each decode worker."""

    def worker(self, role: Role, index: int) -> WorkerShape:
        is_like_prefill = (role is Role.PREFILL) == (index % 2 == 0)
        return WorkerShape(
            role=role,
            num_pages=24,
            num_tail_slots=4,
            num_nics_by_group=(1, 2),
            max_running=5,
            max_waiting=32,
            layer_ns=NS_PER_MS,
            num_ranks=self.prefill_ranks if is_like_prefill else self.decode_ranks,
            num_dp_ranks=self.num_dp_ranks if role is Role.DECODE else 1,
        )


SHAPES = [
    Shape(model=HashModel(layout=GQA)),
    Shape(model=HashModel(layout=GQA, draft_layout=DRAFT), prefill_ranks=2, decode_ranks=1),
    Shape(model=HashModel(layout=GQA, draft_layout=DRAFT), prefill_ranks=1, decode_ranks=2, num_dp_ranks=2),
    Shape(model=HashModel(layout=GQA), prefill_ranks=4, decode_ranks=2),
    Shape(model=HashModel(layout=GQA), prefill_ranks=2, decode_ranks=4, num_dp_ranks=2),
    Shape(model=HashModel(layout=MLA, draft_layout=DRAFT), prefill_ranks=2, decode_ranks=2),
    Shape(model=HashModel(layout=GQA), prefill_ranks=4, decode_ranks=4, num_dp_ranks=2),
]
"""Over 2 KV heads, or the one of MLA: with replica sets on either side, and on both; some with a drafter."""


def calm_plan(shape: Shape, lengths: Iterable[int], *, spacing_ns: int, num_prefill: int = 1) -> Plan:
    """Prompts of some lengths, one after another, and no faults but writes out of order."""
    counts = {Role.PREFILL: num_prefill, Role.DECODE: 1}
    return Plan(
        seed=1,
        model=shape.model,
        workers=tuple(
            (f"{role.value}-{index}", shape.worker(role, index)) for role in counts for index in range(counts[role])
        ),
        max_pending=64,
        max_write_delay_ns=NS_PER_MS,
        reorders_writes=True,
        arrivals=tuple(
            Arrival(
                at_ns=FIRST_REQUEST_NS + index * spacing_ns,
                prompt=tuple((index + token) % VOCABULARY for token in range(length)),
                max_tokens=6,
                num_choices=1,
                timeout_ns=PATIENT_NS,
                leaves_after_ns=None,
            )
            for index, length in enumerate(lengths)
        ),
        faults=(),
        probes=(),
    )


def draining_plans() -> Iterator[Plan]:
    """Prefill workers that are told to stop while they push, and writes that land late."""
    plan = replace(calm_plan(SHAPES[0], EDGES, spacing_ns=10 * NS_PER_MS), max_write_delay_ns=20 * NS_PER_MS)
    for after_ms in range(20, 220, 20):
        fault = Fault(
            at_ns=FIRST_REQUEST_NS + after_ms * NS_PER_MS,
            kind=FaultKind.TERM,
            target="prefill-0",
            other="decode-0",
            duration_ns=4 * NS_PER_S,
        )
        yield replace(plan, faults=(fault,))


def anything(plan: Plan) -> bool:
    del plan
    return True


def has_drafter(plan: Plan) -> bool:
    return plan.model.draft_layout is not None


def has_dp_ranks(plan: Plan) -> bool:
    return any(shape.num_dp_ranks > 1 for _, shape in plan.workers)


def has_ranks(plan: Plan) -> bool:
    return any(shape.num_ranks > 1 for _, shape in plan.workers)


def plans_with_faults(where: Callable[[Plan], bool]) -> Iterator[Plan]:
    return (plan for plan in (plan_of(seed, with_faults=True) for seed in range(MAX_SEEDS)) if where(plan))


def require_found(*findings: str, where: Callable[[Plan], bool] = anything) -> None:
    """A world of some seed breaks a rule, and in one of these ways; or its code stumbles over its own books."""
    require_found_in(plans_with_faults(where), *findings)


def require_found_when_calm(*findings: str) -> None:
    require_found_in((calm_plan(shape, [9, 16], spacing_ns=NS_PER_MS) for shape in SHAPES), *findings)


def require_found_in(plans: Iterable[Plan], *findings: str) -> None:
    for plan in plans:
        violation, _ = run(plan)
        if violation is not None:
            assert violation.rule.startswith(findings), f"seed {plan.seed}: {violation}"
            return
    pytest.fail("no rule was broken in any world")
