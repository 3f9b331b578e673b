"""How fast pages reach another process, beside the limit of the same path measured in the same run.

Every contender moves pages in random order, `num_rounds` times; the time ends when the last page is in the other
process. One repetition is limit, contender, limit, contender (A B A B), so that both see the same neighbours.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

import msgspec

from pdserve.errors import InternalError
from pdserve.units import KIB, MIB


class Limit(Enum):
    """What bounds a path; each value is the name of the executable that measures it."""

    RAW_TCP = "raw_tcp"
    """One TCP stream over loopback, one send and one receive a page."""
    PROCESS_VM_WRITEV = "process_vm_writev"
    """The kernel's copy into another process, 64 pages a call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PageRun:
    """One measurement's work: every page of the region, `num_rounds` times."""

    page_bytes: int
    region_bytes: int
    num_rounds: int

    @property
    def num_pages(self) -> int:
        return self.region_bytes // self.page_bytes

    @property
    def num_bytes(self) -> int:
        return self.num_pages * self.page_bytes * self.num_rounds

    def gb_per_s(self, *, elapsed_ns: int) -> float:
        """Units: 10^9 bytes a second."""
        return self.num_bytes / elapsed_ns


Measure = Callable[[PageRun], float]
"""Does a run and returns its GB/s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    provider: str
    limit: Limit
    measure: Measure
    is_peer: bool = False
    """Another engine: when it fails, it is left out and the others go on."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """A contender at one page size. Speeds are medians; `ratio` is the median of the ratios of the repetitions."""

    provider: str
    page_bytes: int
    gb_per_s: float
    limit: str
    limit_gb_per_s: float
    ratio: float
    spread: float
    """Greatest minus least ratio of the repetitions, over their median."""


class Skipped(msgspec.Struct, frozen=True, kw_only=True):
    provider: str
    reason: str


class Configuration(msgspec.Struct, frozen=True, kw_only=True):
    page_bytes: tuple[int, ...] = (4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB)
    region_bytes: int = 128 * MIB
    num_rounds: int = 2
    repetitions: int = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """One repetition: a contender's speed and the limit's just before it."""

    gb_per_s: float
    limit_gb_per_s: float

    @property
    def ratio(self) -> float:
        return self.gb_per_s / self.limit_gb_per_s


def sum_up(contender: Contender, *, page_bytes: int, pairs: Sequence[Pair]) -> Row:
    """Requires: at least one pair."""
    ratios = [pair.ratio for pair in pairs]
    ratio = statistics.median(ratios)
    return Row(
        provider=contender.provider,
        page_bytes=page_bytes,
        gb_per_s=statistics.median(pair.gb_per_s for pair in pairs),
        limit=contender.limit.value,
        limit_gb_per_s=statistics.median(pair.limit_gb_per_s for pair in pairs),
        ratio=ratio,
        spread=(max(ratios) - min(ratios)) / ratio,
    )


@dataclass(slots=True, kw_only=True)
class Comparison:
    """Measures contenders in turn with their limits. `on_run` is told what is about to run."""

    limits: Mapping[Limit, Measure]
    repetitions: int
    on_run: Callable[[str], None]
    failures: dict[str, Skipped] = field(default_factory=dict[str, Skipped])
    """Peers that failed, by provider: they are left out from then on."""

    def measure(self, contenders: Sequence[Contender], run: PageRun, *, subject: str) -> list[Row]:
        """A row for each contender that did not fail. Raises: what our own contenders raise."""
        pairs: dict[str, list[Pair]] = {contender.provider: [] for contender in contenders}
        for repetition in range(self.repetitions):
            for contender in contenders:
                if contender.provider in self.failures:
                    continue
                self.on_run(f"{subject}, {repetition + 1}/{self.repetitions}: {contender.provider}")
                try:
                    pairs[contender.provider].append(self._measure_pair(contender, run))
                except InternalError as error:
                    if not contender.is_peer:
                        raise
                    self.failures[contender.provider] = Skipped(provider=contender.provider, reason=error.message)
        return [
            sum_up(contender, page_bytes=run.page_bytes, pairs=pairs[contender.provider])
            for contender in contenders
            if contender.provider not in self.failures
        ]

    def _measure_pair(self, contender: Contender, run: PageRun) -> Pair:
        limit_gb_per_s = self.limits[contender.limit](run)
        return Pair(gb_per_s=contender.measure(run), limit_gb_per_s=limit_gb_per_s)
