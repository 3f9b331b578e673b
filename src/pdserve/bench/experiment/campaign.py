"""Carries the experiment out: starts an arm, sends its load, writes down what came of it and of calibrations."""

import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pdserve.bench.engine import OwnEngine, Phase
from pdserve.bench.engine import Point as EnginePoint
from pdserve.bench.experiment.book import Book, RunRecord, felt, save
from pdserve.bench.experiment.calibration import gemms_s
from pdserve.bench.experiment.conditions import Conditions
from pdserve.bench.experiment.cpu_time import cpu_times, shares
from pdserve.bench.experiment.schedule import Run
from pdserve.bench.load.result import SentRequest
from pdserve.bench.load.summary import summarise
from pdserve.bench.provenance import this_commit, this_instant
from pdserve.engine.client import start_engine
from pdserve.engine.port import EngineSpec
from pdserve.launch.deployment import DeploymentSettings, LocalDeployment
from pdserve.units import div_ceil
from pdserve.workload.request import WorkloadRequest

PAGE_SLOTS = 16
NUM_REFERENCES = 21
"""Prefills of each length, of which the median is the reference."""

OVERHEAD_S = 30.0
"""Of a run, beyond its arrivals, as a first guess: starting and stopping three processes, warming up, the last answers,
calibrations."""

WARM_UP_TOKENS = 8
NUM_WARM_UPS = 4

WARM_UP_SEED = 1_000_000
"""Of prompts that no run has: their KV is nobody's prefix."""

Send = Callable[[str, Sequence[WorkloadRequest], int], Awaitable[list[SentRequest]]]
"""Sends requests to a gateway's URL when they are due, with prompts of a seed, and waits for their ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Campaign:
    """What stays the same over all runs."""

    model_dir: Path
    model_name: str
    send: Send
    book_path: Path
    on_progress: Callable[[str], None]
    deadline_s: float
    """Of the monotonic clock: no run begins that would end after it."""

    async def carry_out(self, book: Book, runs: Sequence[Run]) -> Book:
        """Do the runs that the book lacks, then again those that are void, and save it after each."""
        started_s, num_done = time.monotonic(), 0
        gemms_before_s = await gemms_s(book.cpus)
        while missing := book.missing(runs):
            now_s = time.monotonic()
            a_run_s = (now_s - started_s) / num_done if num_done else expected_s(1, seconds=book.seconds)
            run = missing[0]
            told = f"{run.point.name}, seed {run.seed}, arm {run.arm.value}; {len(missing)} to do, {book.num_void} void"
            if now_s + a_run_s > self.deadline_s:
                self.on_progress(f"out of time before {told}")
                break
            left_s = min(a_run_s * len(missing), self.deadline_s - now_s)
            self.on_progress(f"{told}; about {left_s / 60:.0f} minutes left")
            record = await self._run(book, run, gemms_before_s)
            gemms_before_s = record.conditions.gemms_s[-1]
            book = book.with_record(record)
            save(book, self.book_path)
            num_done += 1
        return book

    async def _run(self, book: Book, run: Run, gemms_before_s: tuple[float, ...]) -> RunRecord:
        started = this_instant()
        requests = book.requests(run.point, seed=run.seed)
        async with LocalDeployment(self._settings(book, run)) as deployment:
            await self.send(deployment.url, _warm_up(requests[0]), WARM_UP_SEED)
            before = cpu_times()
            sent = await self.send(deployment.url, requests, run.seed)
            used = shares(before, cpu_times(), num_cpus=book.machine.num_cpus)
        conditions = Conditions.of(used, gemms_s=(gemms_before_s, await gemms_s(book.cpus)))
        return RunRecord(
            point=run.point,
            seed=run.seed,
            arm=run.arm,
            started=started,
            commit=this_commit(),
            conditions=conditions,
            summary=summarise(sent, book.objective(run.point)),
            felt=felt(sent),
        )

    def _settings(self, book: Book, run: Run) -> DeploymentSettings:
        return DeploymentSettings(
            model_dir=str(self.model_dir),
            model_name=self.model_name,
            places=run.arm.places(book.cpus),
            worker_arguments=run.arm.worker_arguments,
        )


def expected_s(num_runs: int, *, seconds: float) -> float:
    """About how long so many runs take."""
    return num_runs * (seconds + OVERHEAD_S)


async def measure_prefill_s(model_dir: Path, lengths: Sequence[int], *, cpu: int) -> dict[int, float]:
    """Of one prompt of each length, whole, on an idle core."""
    spec = EngineSpec(
        model_dir=str(model_dir),
        num_pages=div_ceil(max(lengths) + 1, PAGE_SLOTS),
        page_slots=PAGE_SLOTS,
        num_tail_slots=1,
        num_threads=1,
        cpus=(cpu,),
    )
    engine = OwnEngine(await start_engine(spec))
    try:
        # In turn, so that a bad moment of the machine is a part of each length's times and not all times of one.
        times_s = [{length: await _prefill_s(engine, length) for length in lengths} for _ in range(NUM_REFERENCES)]
    finally:
        await engine.close()
    return {length: statistics.median(times[length] for times in times_s) for length in lengths}


async def _prefill_s(engine: OwnEngine, length: int) -> float:
    return await engine.mean_seconds(EnginePoint(phase=Phase.PREFILL, batch=1, context=length, steps=1))


def _warm_up(like: WorkloadRequest) -> list[WorkloadRequest]:
    """At once, so that every worker gets some."""
    return [
        WorkloadRequest(arrival_s=0.0, num_prompt_tokens=like.num_prompt_tokens, num_output_tokens=WARM_UP_TOKENS)
        for _ in range(NUM_WARM_UPS)
    ]
