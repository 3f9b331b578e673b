"""What a soak found: the contents of its JSON document."""

import msgspec

from pdserve.bench.provenance import Machine
from pdserve.bench.soak.samples import IdlePoint, LedgerHistory, Life
from pdserve.bench.soak.verdict import Growth, IdleGrowth


class KindRow(msgspec.Struct, frozen=True, kw_only=True):
    kind: str
    endings: dict[str, int]
    """By the ending's name; only those that came."""


class SoakResult(msgspec.Struct, frozen=True, kw_only=True):
    machine: Machine
    commit: str | None
    model: str
    seed: int
    duration_s: float
    """Under load and between the rounds, without start and recording."""
    was_interrupted: bool
    num_clients: int
    num_requests: int
    num_wrong: int
    num_hung: int
    kinds: list[KindRow]
    codes: dict[str, int]
    """Errors that fit requests were told."""
    faults: dict[str, int]
    """By kind."""
    growths: list[Growth]
    idle_growths: list[IdleGrowth]
    leaks: list[str]
    problems: list[str]
    """Wrong and hung requests, and processes that did not end or come back, in words."""
    findings: list[str]
    """Empty: passed."""
    idle_points: list[IdlePoint]
    ledgers: list[LedgerHistory]
    lives: list[Life]

    @property
    def num_faults(self) -> int:
        return sum(self.faults.values())

    @property
    def rss_growth(self) -> float | None:
        """The greatest; None where no process was judged."""
        return max((growth.share for growth in self.growths), default=None)

    @property
    def fds_growth(self) -> int:
        return max([0, *(growth.num_fds for growth in self.idle_growths)])
