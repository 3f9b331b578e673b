"""Where a measurement was made: machine, commit and time, so that a figure can be doubted and repeated."""

import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import msgspec


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    cpu: str
    num_cpus: int
    memory_bytes: int
    kernel: str
    python: str


def this_machine() -> Machine:
    return Machine(
        cpu=_cpu_model(),
        num_cpus=len(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        kernel=platform.release(),
        python=platform.python_version(),
    )


def this_commit() -> str | None:
    """The commit that the sources are at, with `-dirty` when they differ from it; none outside a checkout."""
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        timeout=10,
        check=False,
    )
    return described.stdout.strip() or None


def this_instant() -> str:
    """UTC, ISO 8601, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
