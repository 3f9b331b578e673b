"""Which fault comes next, and when: by seed alone, so that a soak's faults can be had again."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from random import Random

from pdserve.config.role import Role

SHORT_FREEZE_S = 1.0
PAST_LEASE_S = 2.0
"""How much longer than a lease a long freeze lasts."""

MOST_DEATH_S = 3.0
"""How long a killed worker stays away."""


class FaultKind(Enum):
    KILL = "kill"
    """SIGKILL, and another start a moment later."""
    DRAIN = "drain"
    """SIGTERM; started again once it has ended by itself."""
    FREEZE = "freeze"
    """SIGSTOP, and SIGCONT within the lease."""
    LONG_FREEZE = "long freeze"
    """The same past the lease, after which its peers take it for dead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    kind: FaultKind
    target: str
    after_s: float
    """Since all had recovered from the fault before."""
    lasts_s: float
    """Until the continuation or the next start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """Who is hit by what."""

    mortal: tuple[str, ...]
    lasting: tuple[str, ...]
    """Frozen, never ended, so that what they gain can be watched over the whole run."""
    gateway: str
    """Frozen for a moment, no more: the clients have no other one."""


def choose_targets(workers: Sequence[tuple[str, Role]], *, gateway: str) -> Targets:
    """The first worker of each role lasts, where there are several."""
    roles = [role for _, role in workers]
    lasting = tuple(
        name for index, (name, role) in enumerate(workers) if roles.count(role) > 1 and roles.index(role) == index
    )
    return Targets(mortal=tuple(name for name, _ in workers if name not in lasting), lasting=lasting, gateway=gateway)


def fault_plan(targets: Targets, *, seed: int, lease_s: float, gap_s: tuple[float, float]) -> Iterator[Fault]:
    """Without end. Equal arguments give equal faults. `gap_s`: the least and the most between two of them."""
    random = Random(seed)
    choices = [
        *((FaultKind.KILL, name, 3) for name in targets.mortal),
        *((FaultKind.DRAIN, name, 2) for name in targets.mortal),
        *((FaultKind.FREEZE, name, 1) for name in (*targets.mortal, *targets.lasting, targets.gateway)),
        *((FaultKind.LONG_FREEZE, name, 2) for name in (*targets.mortal, *targets.lasting)),
    ]
    while True:
        ((kind, target, _),) = random.choices(choices, weights=[weight for _, _, weight in choices])
        lasts_s = {
            FaultKind.KILL: random.uniform(0, MOST_DEATH_S),
            FaultKind.DRAIN: 0.0,
            FaultKind.FREEZE: SHORT_FREEZE_S,
            FaultKind.LONG_FREEZE: lease_s + PAST_LEASE_S,
        }[kind]
        after_s = random.uniform(*gap_s)
        yield Fault(kind=kind, target=target, after_s=after_s, lasts_s=lasts_s)
