"""Who used the cores of this machine, from `/proc`: our processes, others, the hypervisor."""

import os
from dataclasses import dataclass
from pathlib import Path

from pdserve.bench.procfs import (
    IDLE,
    IOWAIT,
    PROC,
    STEAL,
    core_ticks,
    cpu_pressure_us,
    descendants_of,
    process_stats,
)
from pdserve.errors import InternalError


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
    """As of now. Threads: any. Raises: `InternalError` where the kernel does not count."""
    ticks, pressure_us = core_ticks(proc=proc), cpu_pressure_us(proc=proc)
    if ticks is None:
        raise InternalError(f"{proc / 'stat'} does not tell what the cores did: this needs Linux")
    ticks_per_s = os.sysconf("SC_CLK_TCK")
    not_busy = ticks[IDLE] + ticks[IOWAIT] + ticks[STEAL]
    pid, stats = os.getpid() if own_pid is None else own_pid, process_stats(proc=proc)
    own = [pid, *descendants_of(pid, stats)]
    return CpuTimes(
        wall_s=sum(ticks) / ticks_per_s,
        busy_s=(sum(ticks) - not_busy) / ticks_per_s,
        steal_s=ticks[STEAL] / ticks_per_s,
        own_s=sum(stats[each].cpu_ticks for each in own if each in stats) / ticks_per_s,
        psi_s=None if pressure_us is None else pressure_us / 1e6,
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
