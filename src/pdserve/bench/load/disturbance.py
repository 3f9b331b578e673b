"""What else the machine did while a load ran, from the kernel's counters."""

import os
import time
from dataclasses import dataclass
from pathlib import Path

from pdserve.bench.load.result import Disturbance

STAT = Path("/proc/stat")
PRESSURE = Path("/proc/pressure/cpu")

_IDLE_FIELDS = (3, 4)
_STEAL_FIELD = 7
_NUM_FIELDS = 8
"""`man 5 proc_stat`: user nice system idle iowait irq softirq steal; guest time is in user already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineCounters:
    """At one instant; None where the kernel does not tell."""

    instant_s: float
    ticks: tuple[int, ...] | None
    """Of all cores, by what they were spent on."""
    pressure_us: int | None
    """In which some task waited for a core."""
    own_cpu_s: float
    """Of this process, the load generator."""


def read_counters(*, stat: Path = STAT, pressure: Path = PRESSURE) -> MachineCounters:
    times = os.times()
    return MachineCounters(
        instant_s=time.monotonic(),
        ticks=_ticks(_text(stat)),
        pressure_us=_pressure_us(_text(pressure)),
        own_cpu_s=times.user + times.system,
    )


def disturbance_between(before: MachineCounters, after: MachineCounters) -> Disturbance:
    elapsed_s = after.instant_s - before.instant_s
    spent = _difference(before.ticks, after.ticks)
    steal_share = busy_share = pressure_share = None
    if spent is not None and sum(spent) > 0:
        steal_share = spent[_STEAL_FIELD] / sum(spent)
        busy_share = 1 - sum(spent[field] for field in _IDLE_FIELDS) / sum(spent)
    if before.pressure_us is not None and after.pressure_us is not None and elapsed_s > 0:
        pressure_share = min(1.0, (after.pressure_us - before.pressure_us) / (1e6 * elapsed_s))
    return Disturbance(
        steal_share=steal_share,
        psi_cpu_share=pressure_share,
        busy_share=busy_share,
        generator_cpu_s=after.own_cpu_s - before.own_cpu_s,
    )


def _difference(before: tuple[int, ...] | None, after: tuple[int, ...] | None) -> tuple[int, ...] | None:
    if before is None or after is None:
        return None
    return tuple(max(0, late - early) for early, late in zip(before, after, strict=True))


def _ticks(text: str) -> tuple[int, ...] | None:
    for line in text.splitlines():
        name, *fields = line.split()
        if name == "cpu" and len(fields) >= _NUM_FIELDS:
            return tuple(map(int, fields[:_NUM_FIELDS]))
    return None


def _pressure_us(text: str) -> int | None:
    for line in text.splitlines():
        if line.startswith("some "):
            return int(line.rpartition("total=")[2])
    return None


def _text(path: Path) -> str:
    """Empty where there is no such file: kernels without PSI, and other systems."""
    try:
        return path.read_text()
    except OSError:
        return ""
