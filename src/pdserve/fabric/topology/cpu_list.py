"""The kernel's notation for sets of CPUs, such as `0-3,8`."""

from collections.abc import Iterable

MAX_CPUS = 1 << 16
"""Eight times what a Linux kernel can be built for (NR_CPUS is at most 8,192): more is garbage, not a machine."""


def parse_cpu_list(text: str) -> tuple[int, ...]:
    """The CPUs named, ascending, each once; none for an empty text.

    Raises: `ValueError` for anything but numbers below `MAX_CPUS` and ascending ranges of them.
    """
    cpus: set[int] = set()
    for part in text.strip().split(",") if text.strip() else ():
        first_text, dash, last_text = part.partition("-")
        first = _number(first_text)
        last = _number(last_text) if dash else first
        if last < first:
            raise ValueError(f"{part!r} is no ascending range")
        cpus.update(range(first, last + 1))
    return tuple(sorted(cpus))


def format_cpu_list(cpus: Iterable[int]) -> str:
    """The shortest list that `parse_cpu_list` reads as these CPUs."""
    runs: list[list[int]] = []
    for cpu in sorted(set(cpus)):
        if runs and runs[-1][1] + 1 == cpu:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def _number(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= len(str(MAX_CPUS)) and int(text) < MAX_CPUS):
        raise ValueError(f"{text!r} is no CPU number")
    return int(text)
