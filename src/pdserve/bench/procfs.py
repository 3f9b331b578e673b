"""What the kernel tells of processes and cores, in `/proc` (man 5 proc)."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")

GONE = (FileNotFoundError, ProcessLookupError, PermissionError)
"""What reading says of a process that ends meanwhile."""

IDLE, IOWAIT, STEAL = 3, 4, 7
NUM_CORE_FIELDS = 8
"""Of a `cpu` line: user, nice, system, idle, iowait, irq, softirq, steal; guest time is within user and nice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessStat:
    state: str
    """A letter; `T` is stopped by a signal."""
    parent_pid: int
    cpu_ticks: int
    """Of the process, and of its children that ended and were waited for."""


def process_stat(pid: int, *, proc: Path = PROC) -> ProcessStat | None:
    """As of now; None when the process is gone."""
    try:
        text = (proc / str(pid) / "stat").read_text()
    except GONE:
        return None
    # The name is in parentheses, and may hold spaces and parentheses itself.
    fields = text[text.rindex(")") + 2 :].split()
    return ProcessStat(state=fields[0], parent_pid=int(fields[1]), cpu_ticks=sum(map(int, fields[11:15])))


def process_stats(*, proc: Path = PROC) -> dict[int, ProcessStat]:
    """Of every process, by its id."""
    found = {pid: process_stat(pid, proc=proc) for pid in (int(folder.name) for folder in proc.glob("[0-9]*"))}
    return {pid: stat for pid, stat in found.items() if stat is not None}


def descendants_of(pid: int, stats: Mapping[int, ProcessStat]) -> list[int]:
    """Processes that this one started, and those that they started; ascending, without the process itself."""
    children: dict[int, list[int]] = {}
    for child, stat in stats.items():
        children.setdefault(stat.parent_pid, []).append(child)
    found: list[int] = []
    waiting = [pid]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += below
    return sorted(found)


def core_ticks(*, proc: Path = PROC) -> tuple[int, ...] | None:
    """Ticks of all cores together since boot, by `NUM_CORE_FIELDS` uses; None where the kernel does not tell."""
    for line in _text(proc / "stat").splitlines():
        name, *fields = line.split()
        if name == "cpu" and len(fields) >= NUM_CORE_FIELDS:
            return tuple(map(int, fields[:NUM_CORE_FIELDS]))
    return None


def cpu_pressure_us(*, proc: Path = PROC) -> int | None:
    """Since boot, in which some task waited for a core; None where the kernel does not tell."""
    for line in _text(proc / "pressure" / "cpu").splitlines():
        if line.startswith("some "):
            return int(line.rpartition("total=")[2])
    return None


def _text(path: Path) -> str:
    """Empty where there is no such file: kernels without PSI, and other systems."""
    try:
        return path.read_text()
    except OSError:
        return ""
