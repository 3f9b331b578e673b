"""The results of the experiment as they come: written after each run, so that an interruption loses one run at most."""

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec

from pdserve.bench.experiment.conditions import Conditions, void_reason
from pdserve.bench.experiment.points import Arm, Point, Slo
from pdserve.bench.experiment.schedule import Run
from pdserve.bench.load.result import SentRequest, Summary
from pdserve.bench.load.summary import is_complete, tpot_s, ttft_s, worst_gap_s
from pdserve.bench.provenance import Machine
from pdserve.errors import ConfigError
from pdserve.percentile import percentile
from pdserve.workload.objective import Objective
from pdserve.workload.request import WorkloadRequest

BOOK_VERSION = 1
DECIMALS = 4
"""Of the seconds of each request: a tenth of a millisecond, far below what a repetition changes."""


class Felt(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What one client felt, so that any other objective can be judged later. None: there was nothing to feel."""

    ttft_s: float | None
    tpot_s: float | None
    worst_gap_s: float | None
    complete: bool


class RunRecord(msgspec.Struct, frozen=True, kw_only=True):
    point: Point
    seed: int
    arm: Arm
    started: str
    commit: str | None
    conditions: Conditions
    summary: Summary
    felt: tuple[Felt, ...]

    @property
    def run(self) -> Run:
        return Run(point=self.point, seed=self.seed, arm=self.arm)


class Reference(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured before the first run, and holds for all."""

    prefill_s: dict[int, float]
    """Of one prompt of so many tokens on an idle core."""


class Book(msgspec.Struct, frozen=True, kw_only=True):
    version: int = BOOK_VERSION
    machine: Machine
    model: str
    cpus: tuple[int, int]
    seconds: float
    """Of arrivals in a run."""
    slo: Slo
    reference: Reference
    records: tuple[RunRecord, ...] = ()

    def requests(self, point: Point, *, seed: int) -> list[WorkloadRequest]:
        """Of a run. Requires: the point's prefill was measured."""
        workload = point.workload(prefill_s=self.reference.prefill_s[point.num_prompt_tokens], seed=seed)
        return workload.requests(max(1, round(workload.rate_per_s * self.seconds)))

    def objective(self, point: Point) -> Objective:
        """Of the point's requests. Requires: as `requests`."""
        return self.slo.objective(self.reference.prefill_s[point.num_prompt_tokens])

    @property
    def usual_gemm_s(self) -> tuple[float, ...]:
        """By core, the first quartile of all runs' calibrations: what it takes when nobody disturbs it, and not the
        luckiest moment. A measurement of its own before the runs may hit a bad moment, and would void all of them.

        Requires: a run.
        """
        calibrations = [gemms_s for record in self.records for gemms_s in record.conditions.gemms_s]
        return tuple(percentile(of_core, 25) for of_core in zip(*calibrations, strict=True))

    @property
    def counted(self) -> dict[Run, RunRecord]:
        """The newest of each run that is not void."""
        return {record.run: record for record, void in self.judged() if void is None}

    @property
    def made(self) -> dict[Run, RunRecord]:
        """Of each run the one that counts, or else the newest that is void."""
        return {record.run: record for record in self.records} | self.counted

    def judged(self) -> list[tuple[RunRecord, str | None]]:
        """All runs in the order they were made, each with why it does not count. Each new run may change it for all:
        what is usual is only known from many."""
        usual_s = self.usual_gemm_s
        return [(record, void_reason(record.conditions, reference_s=usual_s)) for record in self.records]

    @property
    def num_void(self) -> int:
        return sum(void is not None for _, void in self.judged())

    def with_record(self, record: RunRecord) -> "Book":
        return msgspec.structs.replace(self, records=(*self.records, record))

    def with_prefills(self, prefill_s: dict[int, float]) -> "Book":
        """For points that were not measured before; what was measured stays."""
        reference = msgspec.structs.replace(self.reference, prefill_s={**prefill_s, **self.reference.prefill_s})
        return msgspec.structs.replace(self, reference=reference)

    def missing(self, runs: Sequence[Run]) -> list[Run]:
        """Those that do not count yet, those that were made least often first."""
        counted, times_made = self.counted, Counter(record.run for record in self.records)
        return sorted((run for run in runs if run not in counted), key=times_made.__getitem__)


def felt(requests: Sequence[SentRequest]) -> tuple[Felt, ...]:
    return tuple(
        Felt(
            ttft_s=_rounded(ttft_s(request) if request.token_s else None),
            tpot_s=_rounded(tpot_s(request)),
            worst_gap_s=_rounded(worst_gap_s(request)),
            complete=is_complete(request),
        )
        for request in requests
    )


def save(book: Book, path: Path) -> None:
    """Whole or not at all: a crash while writing leaves the old file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_bytes(msgspec.json.format(msgspec.json.encode(book), indent=0) + b"\n")
    os.replace(unfinished, path)  # noqa: PTH105


def load(path: Path) -> Book:
    """Raises: `ConfigError`."""
    try:
        book = msgspec.json.decode(path.read_bytes(), type=Book)
    except OSError as error:
        raise ConfigError(f"can't read {path}: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path} is no book of this experiment: {error}") from error
    if book.version != BOOK_VERSION:
        raise ConfigError(f"{path} has version {book.version}, this script writes {BOOK_VERSION}: begin anew")
    return book


def require_resumable(book: Book, fresh: Book) -> None:
    """Raises: `ConfigError` when runs of the two would not compare; names the setting."""
    for name in ("model", "cpus", "seconds", "slo"):
        before, now = getattr(book, name), getattr(fresh, name)
        if before != now:
            raise ConfigError(
                f"--resume: the book was begun with {name} {before}, not {now}: use the same, or begin anew"
            )
    if book.machine.cpu != fresh.machine.cpu:
        raise ConfigError(f"--resume: the book is of another machine ({book.machine.cpu}): begin anew")


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, DECIMALS)
