"""Whether a soak passed. Pure: samples and counts in, findings out."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.bench.soak.samples import IdleFigures, IdlePoint, LedgerHistory, Life
from pdserve.units import div_ceil

RSS_GROWTH_BOUND = 0.03
"""Of the median of the last quarter over that of the second. Allocators keep what they once had and fill it by chance:
over five minutes, with a hundred requests, it was up to 1.3% (2-core Xeon VM, 2026-11-30)."""

MIN_LIFE_SHARE = 0.5
"""Of the run: who lived shorter is not judged, nor who began amid it, and so without the recording to warm up."""

MAX_LATE_THREADS = 8
"""The pools of a process start a thread whenever all that they have are busy, which may be late; this is all of them
(asyncio's has 6 on 2 cores, that for grammars 2). A thread lost with each fault or request soon is more."""

MIN_QUARTER_SAMPLES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """Of one long life's own resident memory under load: without tmpfs, where its KV cache is, which is as large as it
    was made, and resident as far as it was used."""

    name: str
    pid: int
    before_bytes: float
    """Median of the second quarter."""
    after_bytes: float
    """Median of the last quarter."""

    @property
    def share(self) -> float:
        return self.after_bytes / self.before_bytes - 1


def memory_growths(lives: Sequence[Life], *, run_s: float) -> list[Growth]:
    """Of the lives that lasted, greatest first. The first quarter is left out: it is warm-up."""
    started_s = min((life.at_s[0] for life in lives if life.at_s), default=0.0)
    lasting = [life for life in lives if life.at_s and life.at_s[0] == started_s and life.span_s > 0]
    found = [_growth(life) for life in lasting if life.span_s >= MIN_LIFE_SHARE * run_s]
    return sorted((growth for growth in found if growth), key=lambda growth: growth.share, reverse=True)


def _growth(life: Life) -> Growth | None:
    """None where too little was seen in one of the quarters that are compared."""
    quarters: list[list[int]] = [[], [], [], []]
    for at_s, is_loaded, rss_bytes, shared_bytes in zip(
        life.at_s, life.is_loaded, life.rss_bytes, life.shared_rss_bytes, strict=True
    ):
        if is_loaded:
            quarters[min(3, int(4 * (at_s - life.at_s[0]) / life.span_s))].append(rss_bytes - shared_bytes)
    _, second, _, last = quarters
    if min(len(second), len(last)) < MIN_QUARTER_SAMPLES:
        return None
    return Growth(
        name=life.name, pid=life.pid, before_bytes=statistics.median(second), after_bytes=statistics.median(last)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleGrowth:
    """What one process has at the last idle point of its life beyond the most at those of its first half.

    The most, because connections to peers are opened when they are first used: each is some descriptors.
    """

    name: str
    pid: int
    num_fds: int
    num_threads: int
    shared_bytes: int


def idle_growths(points: Sequence[IdlePoint]) -> list[IdleGrowth]:
    """Of the processes that lived over three points."""
    lives: dict[tuple[str, int], list[IdleFigures]] = {}
    for point in points:
        for name, figures in point.processes.items():
            lives.setdefault((name, figures.pid), []).append(figures)
    return [_idle_growth(name, pid, seen) for (name, pid), seen in lives.items() if len(seen) > 2]


def _idle_growth(name: str, pid: int, seen: Sequence[IdleFigures]) -> IdleGrowth:
    early, last = seen[: div_ceil(len(seen), 2)], seen[-1]
    return IdleGrowth(
        name=name,
        pid=pid,
        num_fds=last.num_fds - max(each.num_fds for each in early),
        num_threads=last.num_threads - max(each.num_threads for each in early),
        shared_bytes=last.shared_bytes - max(each.shared_bytes for each in early),
    )


def leaks_in(histories: Sequence[LedgerHistory], points: Sequence[IdlePoint]) -> list[str]:
    """What a ledger called leaked at any time, and what somebody still had when nothing was left to do; each once."""
    told = [f"{history.name}: {leak}" for history in histories for leak in history.leaks]
    kept = [owned for point in points for owned in point.owned]
    return list(dict.fromkeys([*told, *kept]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Of the whole run."""

    requests: int
    wrong: int
    hung: int


def findings(
    counts: Counts,
    growths: Sequence[Growth],
    idle: Sequence[IdleGrowth],
    leaks: Sequence[str],
    problems: Sequence[str],
) -> list[str]:
    """Why the soak failed; nothing when it passed. `problems` are of processes that did not end or come back."""
    found: list[str] = []
    if counts.requests == 0:
        found.append("no request was sent: run for longer")
    if counts.wrong or counts.hung:
        found.append(f"{counts.wrong} answers were wrong and {counts.hung} requests hung")
    if not growths or not idle:
        found.append("no process lived long enough to be judged: run for longer")
    for growth in growths:
        if growth.share > RSS_GROWTH_BOUND:
            found.append(f"{growth.name} gained {growth.share:.1%} of memory from its second quarter to its last")
    for each in idle:
        if each.num_fds > 0:
            found.append(f"{each.name} has {each.num_fds} more open descriptors when idle")
        if each.num_threads > MAX_LATE_THREADS:
            found.append(f"{each.name} has {each.num_threads} more threads when idle")
        if each.shared_bytes > 0:
            found.append(f"{each.name} maps {each.shared_bytes} more shared bytes when idle")
    return [*found, *leaks, *problems]
