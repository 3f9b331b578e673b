"""What a seed stands for: the circumstances of a world, what its clients ask, and which faults come when."""

import random
from dataclasses import dataclass, replace
from enum import Enum

from pdserve.config.role import Role
from pdserve.simulate.gateway_end import GATEWAY
from pdserve.simulate.model import DRAFT, GQA, MLA, PAGE_SLOTS, VOCABULARY, HashModel
from pdserve.simulate.worker import WorkerShape
from pdserve.units import NS_PER_MS, NS_PER_S, NS_PER_US

FIRST_REQUEST_NS = 200 * NS_PER_MS
"""Workers have joined by then, and met each other."""

MAX_PROMPT_TOKENS = 36
MAX_ANSWER_TOKENS = 8
PATIENT_NS = 600 * NS_PER_S
"""The product's own deadline of a request: nothing that waits for it ends in time to be called an ending."""


NUM_PROBES = 2
"""No more than the smallest queue takes."""


class FaultKind(Enum):
    KILL = "kill"
    """And a successor at the same address, after the duration."""
    TERM = "term"
    """Told to stop: it drains, for no longer than the duration, and then has a successor."""
    TERM_TWICE = "term_twice"
    """Told to stop, and again after the duration: it ends at once then."""
    HANG = "hang"
    """Stands still for the duration; over a lease, the others take it for dead."""
    PARTITION = "partition"
    """Two processes hear nothing of each other for the duration; writes between workers still land, late."""
    DEAF = "deaf"
    """The same one way: the target does not hear the other."""
    CUT = "cut"
    """The control connection of two processes ends."""
    SLOW = "slow"
    """All control messages and writes take long for the duration."""
    WRITE_ERRORS = "write_errors"
    """Some writes of all workers fail for the duration."""
    SHORT = "short"
    """The worker's fabric has no room for one of the next few pushes."""
    STALE = "stale"
    """Messages of earlier incarnations arrive again."""
    JUMP = "jump"
    """The whole machine stands still: afterwards all clocks are ahead of what anybody did."""


HAPPENS_TO_ALL = {FaultKind.PARTITION, FaultKind.SLOW, FaultKind.WRITE_ERRORS, FaultKind.JUMP}
"""A partition too: it makes all writes slow."""


HAPPENS_TO_GATEWAY = {FaultKind.KILL, FaultKind.TERM, FaultKind.TERM_TWICE, FaultKind.HANG}
"""As to a worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    at_ns: int
    kind: FaultKind
    target: str
    other: str
    duration_ns: int

    def __str__(self) -> str:
        return f"{self.kind.value} {self.target} ({self.other}) for {self.duration_ns / NS_PER_MS:.0f} ms"


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    at_ns: int
    prompt: tuple[int, ...]
    max_tokens: int
    num_choices: int
    timeout_ns: int
    leaves_after_ns: int | None
    num_retries: int = 0
    """How often the client asks again after what is told it, when it is refused with 429 or 503."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All of it is drawn from the seed; the run draws the rest (delays, say) from the seed too."""

    seed: int
    model: HashModel
    workers: tuple[tuple[str, WorkerShape], ...]
    max_pending: int
    max_write_delay_ns: int
    reorders_writes: bool
    arrivals: tuple[Arrival, ...]
    faults: tuple[Fault, ...]
    probes: tuple[Arrival, ...]
    """Asked when all is quiet again, and answered then."""

    @property
    def touched(self) -> frozenset[str] | None:
        """Whom faults happen to; None: some happen to all, as what happens to the gateway does."""
        if any(fault.kind in HAPPENS_TO_ALL or fault.target == GATEWAY for fault in self.faults):
            return None
        return frozenset(name for fault in self.faults for name in (fault.target, fault.other))

    @property
    def end_of_faults_ns(self) -> int:
        return max((fault.at_ns + fault.duration_ns for fault in self.faults), default=0)


def plan_of(seed: int, *, with_faults: bool) -> Plan:
    draw = random.Random(seed)
    model = HashModel(layout=draw.choice([GQA, GQA, MLA]), draft_layout=draw.choice([None, None, DRAFT]))
    workers = tuple(
        (f"{role.value}-{index}", _shape(draw, role))
        for role in (Role.PREFILL, Role.DECODE)
        for index in range(draw.randint(1, 3))
    )
    span_ns = draw.choice([NS_PER_S // 2, NS_PER_S, 3 * NS_PER_S])
    arrivals_span_ns = draw.choice([20 * NS_PER_MS, span_ns, span_ns, span_ns])
    arrivals = sorted(
        (_arrival(draw, arrivals_span_ns) for _ in range(draw.randint(15, 40))), key=lambda one: one.at_ns
    )
    names = [name for name, _ in workers]
    faults = [_fault(draw, names, draw.choice([arrivals_span_ns, span_ns])) for _ in range(draw.randint(1, 8))]
    return Plan(
        seed=seed,
        model=model,
        workers=workers,
        max_pending=draw.choice([8, 64, 64]),
        max_write_delay_ns=draw.choice([0, 2 * NS_PER_MS, 20 * NS_PER_MS]),
        reorders_writes=draw.random() < 0.7,
        arrivals=tuple(sorted(arrivals, key=lambda arrival: arrival.at_ns)),
        probes=tuple(
            replace(_arrival(draw, 0), timeout_ns=PATIENT_NS, leaves_after_ns=None, num_retries=0)
            for _ in range(NUM_PROBES)
        ),
        faults=tuple(sorted(faults, key=lambda fault: fault.at_ns)) if with_faults else (),
    )


def _shape(draw: random.Random, role: Role) -> WorkerShape:
    return WorkerShape(
        role=role,
        num_pages=draw.randint(12, 32),
        num_tail_slots=draw.randint(2, 6),
        num_nics_by_group=draw.choice([(1,), (2,), (1, 2)]),
        max_running=draw.randint(2, 6),
        max_waiting=draw.randint(2, 16),
        layer_ns=draw.randint(300 * NS_PER_US, 3 * NS_PER_MS),
        num_ranks=draw.choice([1, 1, 2, 4]),
        num_dp_ranks=draw.choice([1, 1, 2]) if role is Role.DECODE else 1,
    )


def _arrival(draw: random.Random, span_ns: int) -> Arrival:
    """Prompts at the edges of pages are as likely as all others together."""
    edges = [1, 2, *(PAGE_SLOTS * pages + more for pages in (1, 2, 5) for more in (-1, 0, 1, 2))]
    num_tokens = draw.choice([draw.choice(edges), draw.randint(1, MAX_PROMPT_TOKENS)])
    return Arrival(
        at_ns=FIRST_REQUEST_NS + draw.randint(0, span_ns),
        prompt=tuple(draw.randrange(VOCABULARY) for _ in range(num_tokens)),
        max_tokens=draw.randint(1, MAX_ANSWER_TOKENS),
        num_choices=draw.choice([1, 1, 1, 1, 2]),
        timeout_ns=draw.choice([draw.randint(2, 100) * NS_PER_MS, PATIENT_NS, PATIENT_NS, PATIENT_NS]),
        leaves_after_ns=draw.randint(0, 100 * NS_PER_MS) if draw.random() < 0.25 else None,
        num_retries=draw.choice([0, 0, 0, 1, 3]),
    )


def _fault(draw: random.Random, names: list[str], span_ns: int) -> Fault:
    kind = draw.choice(list(FaultKind))
    target = draw.choice([*names, GATEWAY] if kind in HAPPENS_TO_GATEWAY else names)
    role, _, _ = target.partition("-")
    others = [name for name in (*names, GATEWAY) if not name.startswith(role)]
    return Fault(
        at_ns=FIRST_REQUEST_NS + draw.randint(0, span_ns),
        kind=kind,
        target=target,
        other=draw.choice(others),
        duration_ns=draw.choice([draw.randint(0, 300 * NS_PER_MS), draw.randint(NS_PER_S, 4 * NS_PER_S)]),
    )
