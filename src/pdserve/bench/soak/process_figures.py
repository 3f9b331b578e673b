"""What the kernel says of a process: memory, threads, open descriptors, memory that is shared by a file."""

from dataclasses import dataclass
from pathlib import Path

from pdserve.bench.procfs import GONE, PROC
from pdserve.units import KIB

_SHARED_PREFIXES = ("/dev/shm/", "/memfd:")
"""Both are tmpfs: `/dev/shm` by name, memfd without one. The KV caches are memfds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessFigures:
    rss_bytes: int
    """Resident memory, shared pages included."""
    shared_rss_bytes: int
    """Of these, pages of tmpfs: each page of a KV cache that this process has touched."""
    num_fds: int
    num_threads: int
    shared_bytes: int
    """Of mapped files in `/dev/shm` and mapped memfds, each counted once, resident or not."""


def read_figures(pid: int, *, proc: Path = PROC) -> ProcessFigures | None:
    """As of now; None when the process is gone, or is a zombie."""
    folder = proc / str(pid)
    try:
        fields = _status_fields(folder)
        if "VmRSS" not in fields:
            return None
        return ProcessFigures(
            rss_bytes=int(fields["VmRSS"].split()[0]) * KIB,
            shared_rss_bytes=int(fields["RssShmem"].split()[0]) * KIB,
            num_fds=sum(1 for _ in (folder / "fd").iterdir()),
            num_threads=int(fields["Threads"]),
            shared_bytes=_shared_bytes((folder / "maps").read_text()),
        )
    except GONE:
        return None


def _status_fields(folder: Path) -> dict[str, str]:
    lines = (folder / "status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def _shared_bytes(maps: str) -> int:
    """Each line is `start-end perms offset dev inode path`; a file may be mapped in several pieces."""
    spans: set[tuple[str, int, int]] = set()
    for line in maps.splitlines():
        parts = line.split(maxsplit=5)
        if len(parts) == 6 and parts[5].startswith(_SHARED_PREFIXES):
            start, stop = (int(each, 16) for each in parts[0].split("-"))
            offset = int(parts[2], 16)
            spans.add((parts[4], offset, offset + stop - start))
    return sum(stop - start for _, start, stop in spans)
