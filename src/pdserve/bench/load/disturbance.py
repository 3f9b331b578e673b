"""What else the machine did while a load ran, from the kernel's counters."""

import os
import time
from dataclasses import dataclass
from pathlib import Path

from pdserve.bench.load.result import Disturbance
from pdserve.bench.procfs import IDLE, IOWAIT, PROC, STEAL, core_ticks, cpu_pressure_us


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


def read_counters(*, proc: Path = PROC) -> MachineCounters:
    times = os.times()
    return MachineCounters(
        instant_s=time.monotonic(),
        ticks=core_ticks(proc=proc),
        pressure_us=cpu_pressure_us(proc=proc),
        own_cpu_s=times.user + times.system,
    )


def disturbance_between(before: MachineCounters, after: MachineCounters) -> Disturbance:
    elapsed_s = after.instant_s - before.instant_s
    spent = _difference(before.ticks, after.ticks)
    steal_share = busy_share = pressure_share = None
    if spent is not None and sum(spent) > 0:
        steal_share = spent[STEAL] / sum(spent)
        busy_share = 1 - (spent[IDLE] + spent[IOWAIT]) / sum(spent)
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
