"""The engine alone, one core, float32: tokens a second beside `transformers` and beside the limits of the core.

One repetition of a point is limit, `transformers`, pdserve, one after another on the same core, so that all three see
the same neighbours. Times are wall clock: measure on a quiet machine.
"""

import asyncio
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from enum import Enum
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np

from pdserve.bench.provenance import Machine, this_commit, this_machine
from pdserve.config.environment import child_environment
from pdserve.engine.client import RankEngine, start_engine
from pdserve.engine.port import EngineSpec
from pdserve.errors import ConfigError, InternalError
from pdserve.ids import SequenceId
from pdserve.sampling import SamplingParams
from pdserve.schedule.batch import Batch, Chunk, NewSequence
from pdserve.shared_region import host_buffer
from pdserve.units import NS_PER_S, div_ceil

PEER_FOLDER = Path(__file__).parents[3] / "benchmarks" / "peers_engine"
PEER_DEADLINE_S = 600.0
PAGE_SLOTS = 16


class Phase(Enum):
    PREFILL = "prefill"
    """One prompt of `context` tokens; `batch` is 1."""
    DECODE = "decode"
    """One token for each of `batch` sequences that hold `context` tokens."""


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """What one step does, and how many are averaged."""

    phase: Phase
    batch: int
    context: int
    steps: int

    @property
    def num_tokens(self) -> int:
        """Tokens that a step computes."""
        return self.context if self.phase is Phase.PREFILL else self.batch


DEFAULT_POINTS = (
    Point(phase=Phase.PREFILL, batch=1, context=1024, steps=1),
    *(
        Point(phase=Phase.DECODE, batch=batch, context=context, steps=steps)
        for batch, steps in ((1, 20), (8, 10), (32, 5))
        for context in (256, 1024)
    ),
)
DEFAULT_REPETITIONS = 5


class EngineRow(msgspec.Struct, frozen=True, kw_only=True):
    """One point. Speeds are medians in tokens a second, ratios medians over the repetitions."""

    phase: Phase
    batch: int
    context: int
    tokens_per_s: float
    spread: float
    """Greatest minus least speed of the repetitions, over their median."""
    transformers_tokens_per_s: float | None
    ratio: float | None
    """Ours to that of `transformers`."""
    limit_tokens_per_s: float | None
    """What the core's matrix products and its memory bandwidth would allow, whichever is less."""
    limit_ratio: float | None


class EngineReport(msgspec.Struct, frozen=True, kw_only=True):
    rows: tuple[EngineRow, ...]
    skipped: tuple[str, ...]
    machine: Machine
    commit: str | None


class Stepper(Protocol):
    async def mean_seconds(self, point: Point) -> float:
        """The time of one step, averaged over `point.steps`."""
        ...


async def run_engine_bench(
    model_dir: Path,
    *,
    cpu: int,
    points: Sequence[Point] = DEFAULT_POINTS,
    repetitions: int = DEFAULT_REPETITIONS,
    on_run: Callable[[str], None] = lambda message: None,
) -> EngineReport:
    """Raises: `ConfigError` without a checkout, `InternalError` when a measured process fails."""
    async with AsyncExitStack() as stack:
        engine = OwnEngine(await start_engine(_spec(model_dir, cpu=cpu, points=points)))
        stack.push_async_callback(engine.close)
        limit = await PeerProgram.start("core_limits.py", model_dir, cpu=cpu)
        stack.push_async_callback(limit.close)
        steppers: dict[str, Stepper] = {"limit": limit}
        skipped: list[str] = []
        if importlib.util.find_spec("transformers") is None:
            skipped.append("transformers: not installed; run pip install transformers")
        else:
            peer = await PeerProgram.start("transformers_engine.py", model_dir, cpu=cpu)
            stack.push_async_callback(peer.close)
            steppers["transformers"] = peer
        steppers["pdserve"] = engine
        rows = [await _measure(point, steppers, repetitions, on_run) for point in points]
    return EngineReport(rows=tuple(rows), skipped=tuple(skipped), machine=this_machine(), commit=this_commit())


def _spec(model_dir: Path, *, cpu: int, points: Sequence[Point]) -> EngineSpec:
    num_pages = max(point.batch * div_ceil(point.context + 1, PAGE_SLOTS) for point in points)
    return EngineSpec(
        model_dir=str(model_dir),
        num_pages=num_pages,
        page_slots=PAGE_SLOTS,
        num_tail_slots=1,
        num_threads=1,
        cpus=(cpu,),
    )


async def _measure(
    point: Point, steppers: dict[str, Stepper], repetitions: int, on_run: Callable[[str], None]
) -> EngineRow:
    speeds: dict[str, list[float]] = {name: [] for name in steppers}
    for repetition in range(repetitions):
        for name, stepper in steppers.items():
            on_run(f"{point.phase.value} batch={point.batch} context={point.context} {name} {repetition + 1}")
            speeds[name].append(point.num_tokens / await stepper.mean_seconds(point))
    return sum_up(point, speeds)


def sum_up(point: Point, speeds: dict[str, list[float]]) -> EngineRow:
    """Requires: `speeds["pdserve"]`, and as many repetitions of the others that are there."""
    ours = speeds["pdserve"]
    median = statistics.median(ours)

    def ratio_to(name: str) -> float | None:
        others = speeds.get(name)
        return statistics.median(a / b for a, b in zip(ours, others, strict=True)) if others else None

    def median_of(name: str) -> float | None:
        return statistics.median(speeds[name]) if name in speeds else None

    return EngineRow(
        phase=point.phase,
        batch=point.batch,
        context=point.context,
        tokens_per_s=median,
        spread=(max(ours) - min(ours)) / median,
        transformers_tokens_per_s=median_of("transformers"),
        ratio=ratio_to("transformers"),
        limit_tokens_per_s=median_of("limit"),
        limit_ratio=ratio_to("limit"),
    )


class OwnEngine:
    """Steps through the same client that a worker uses, so that the way to the rank process counts too."""

    def __init__(self, engine: RankEngine) -> None:
        self._engine = engine
        self._next_pass_index = 0
        self._next_sequence_id = 0
        # Pages that were never written are not memory yet, and reading them would cost nothing.
        values = np.frombuffer(host_buffer(engine.kv_regions[0]), dtype=np.float32)
        values[:] = np.random.default_rng(0).standard_normal(len(values), dtype=np.float32)

    async def mean_seconds(self, point: Point) -> float:
        sequence_ids = [SequenceId(self._next_sequence_id + index) for index in range(point.batch)]
        self._next_sequence_id += point.batch
        chunks = tuple(self._chunk(point, index, sequence_ids[index]) for index in range(point.batch))
        sampling = SamplingParams(max_tokens=point.steps + 1, temperature=0.0)
        news = tuple(
            NewSequence(sequence_id=sequence_id, prompt_token_ids=(1,), output_token_ids=(), sampling=sampling)
            for sequence_id in sequence_ids
        )
        # The first step warms up, and announces the sequences.
        await self._run(chunks, new_sequences=news)
        started_ns = time.monotonic_ns()
        for _ in range(point.steps):
            await self._run(chunks)
        return (time.monotonic_ns() - started_ns) / NS_PER_S / point.steps

    def _chunk(self, point: Point, index: int, sequence_id: SequenceId) -> Chunk:
        start = 0 if point.phase is Phase.PREFILL else point.context
        num_tokens = point.context if point.phase is Phase.PREFILL else 1
        num_pages = div_ceil(point.context + 1, PAGE_SLOTS)
        return Chunk(
            sequence_id=sequence_id,
            start=start,
            token_ids=tuple(1 + (index + offset) % 100 for offset in range(num_tokens)),
            page_indices=tuple(range(index * num_pages, (index + 1) * num_pages)),
            samples=True,
        )

    async def _run(self, chunks: tuple[Chunk, ...], *, new_sequences: tuple[NewSequence, ...] = ()) -> None:
        batch = Batch(pass_index=self._next_pass_index, chunks=chunks, new_sequences=new_sequences)
        self._next_pass_index += 1
        await self._engine.run(batch)

    async def close(self) -> None:
        await self._engine.close()


class PeerProgram:
    """A program of `benchmarks/peers_engine`, which loads once and then answers one line a point."""

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self._name = name
        self._process = process

    @classmethod
    async def start(cls, name: str, model_dir: Path, *, cpu: int) -> "PeerProgram":
        script = PEER_FOLDER / name
        if not script.is_file():
            raise ConfigError(f"{script} is missing: this benchmark runs in a checkout of the sources")
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            str(script),
            str(model_dir),
            str(cpu),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env=child_environment(OMP_NUM_THREADS="1"),
        )
        program = cls(name, process)
        await program._answer()
        return program

    async def mean_seconds(self, point: Point) -> float:
        if self._process.stdin is None:
            raise InternalError(f"{self._name} has no standard input")
        self._process.stdin.write(msgspec.json.encode(point) + b"\n")
        return float((await self._answer())["seconds"])

    async def _answer(self) -> dict[str, float | str]:
        if self._process.stdout is None:
            raise InternalError(f"{self._name} has no standard output")
        try:
            line = await asyncio.wait_for(self._process.stdout.readline(), PEER_DEADLINE_S)
        except TimeoutError:
            raise InternalError(f"{self._name} did not answer within {PEER_DEADLINE_S:.0f} s") from None
        if not line:
            raise InternalError(f"{self._name} ended with exit code {await self._process.wait()}")
        return msgspec.json.decode(line, type=dict[str, float | str])

    async def close(self) -> None:
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()
