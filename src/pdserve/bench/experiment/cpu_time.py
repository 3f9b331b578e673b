"""Who used the cores of this machine, from `/proc`: our processes, others, the hypervisor."""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")

_NUM_BUSY_FIELDS = 8
"""Of a `cpu` line: user, nice, system, idle, iowait, irq, softirq, steal; guest time is within user and nice."""
_IDLE, _IOWAIT, _STEAL = 3, 4, 7


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuTimes:
    """Seconds since boot, over all cores together."""

    wall_s: float
    """Of all cores: their number times the clock."""
    busy_s: float
    """Of all processes, and of interrupts."""
    steal_s: float
    own_s: float
    """Of this process, its descendants, and those of them that ended and were waited for."""
    psi_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuShares:
    steal: float
    foreign: float
    own: float
    psi: float | None


def cpu_times(proc: Path = PROC, *, own_pid: int | None = None) -> CpuTimes:
    """As of now. Threads: any."""
    ticks_per_s = os.sysconf("SC_CLK_TCK")
    line = (proc / "stat").read_text().split("\n", 1)[0]
    fields = [int(field) for field in line.split()[1 : 1 + _NUM_BUSY_FIELDS]]
    not_busy = fields[_IDLE] + fields[_IOWAIT] + fields[_STEAL]
    return CpuTimes(
        wall_s=sum(fields) / ticks_per_s,
        busy_s=(sum(fields) - not_busy) / ticks_per_s,
        steal_s=fields[_STEAL] / ticks_per_s,
        own_s=_tree_ticks(proc, os.getpid() if own_pid is None else own_pid) / ticks_per_s,
        psi_s=_psi_s(proc),
    )


def shares(before: CpuTimes, after: CpuTimes, *, num_cpus: int) -> CpuShares:
    """Between two readings. Ticks of other processes and of ours are counted at different moments, so a small share may
    come out negative; it is 0 then."""
    wall_s = max(after.wall_s - before.wall_s, 1e-9)
    own_s = after.own_s - before.own_s
    psi_s = None if before.psi_s is None or after.psi_s is None else after.psi_s - before.psi_s
    return CpuShares(
        steal=(after.steal_s - before.steal_s) / wall_s,
        foreign=max(0.0, after.busy_s - before.busy_s - own_s) / wall_s,
        own=own_s / wall_s,
        psi=None if psi_s is None else psi_s * num_cpus / wall_s,
    )


def _tree_ticks(proc: Path, root: int) -> int:
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for pid, text in _process_stats(proc):
        # The name is in parentheses, and may hold spaces and parentheses itself.
        fields = text[text.rindex(")") + 2 :].split()
        parents[pid] = int(fields[1])
        ticks[pid] = sum(int(field) for field in fields[11:15])
    return sum(count for pid, count in ticks.items() if _descends(pid, root, parents))


def _descends(pid: int, root: int, parents: dict[int, int]) -> bool:
    while pid != root:
        if pid not in parents or parents[pid] == pid:
            return False
        pid = parents[pid]
    return True


def _process_stats(proc: Path) -> Iterable[tuple[int, str]]:
    for folder in proc.iterdir():
        if folder.name.isdigit():
            try:
                yield int(folder.name), (folder / "stat").read_text()
            except (FileNotFoundError, ProcessLookupError):
                continue  # It ended between the two looks.


def _psi_s(proc: Path) -> float | None:
    try:
        line = (proc / "pressure" / "cpu").read_text().split("\n", 1)[0]
    except OSError:
        return None
    return int(line.rpartition("total=")[2]) / 1e6
