"""What passes of the engine and pushes of its KV cost here, for a performance model to be fitted to.

Every repetition goes once through all points, in an order of its own, so that a neighbour who disturbs the machine for
a while disturbs one repetition of many points and not all repetitions of one. Of passes the fast repetitions are fitted
to, and kept beside it how the others deviated; of pushes the medians.
"""

import asyncio
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np

from pdserve.bench.profile_points import PassPoint, pass_points, push_pages
from pdserve.bench.provenance import Machine, this_commit, this_instant, this_machine
from pdserve.bench.transfer_fabric import PushRun, measure_push_run
from pdserve.engine.client import RankEngine, start_engine
from pdserve.engine.port import EngineSpec
from pdserve.errors import ConfigError
from pdserve.fabric.topology.cpu_list import format_cpu_list
from pdserve.ids import SequenceId
from pdserve.kv.shard import KvSharding
from pdserve.percentile import percentile
from pdserve.perfmodel.fit import fit_model, fit_push, held_out_accuracy
from pdserve.perfmodel.profile import Profile, Source
from pdserve.perfmodel.sample import PassSample, PushSample
from pdserve.sampling import SamplingParams
from pdserve.schedule.batch import Batch, Chunk, NewSequence
from pdserve.shared_region import host_buffer
from pdserve.units import GIB, NS_PER_S

PAGE_SLOTS = 16
UNDISTURBED_PERCENT = 10
"""On a shared host a pass takes 1.0 or 1.4 times as long, by what the neighbours do in that second, and the median is
the one for some points and the other for others: a model fitted to medians is off by twice as much as one fitted to
these (30 November 2026, Xeon of 2 virtual cores). What passes take beyond it are the deviations."""
DEVIATION_DECIMALS = 3
VOCABULARY = 100
"""Token ids are below it: every model knows as many."""
PASSES, PUSHES = "passes", "pushes"
"""Keys of the profile's sources."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfilePlan:
    model_dir: Path
    cpus: tuple[int, ...]
    """Each computes the points on its own, at the same time as the others: so do the workers of a host, which share its
    memory and its clock."""
    provider: str
    max_prompt_tokens: int = 1024
    max_batch: int = 32
    repetitions: int = 5
    """On each core."""
    seed: int = 0
    """Of the order of the points, and of which are held out."""

    @property
    def points(self) -> tuple[PassPoint, ...]:
        """Raises: as `pass_points`."""
        return pass_points(max_prompt_tokens=self.max_prompt_tokens, max_batch=self.max_batch)


@dataclass(slots=True, kw_only=True)
class Timings:
    """Seconds of every repetition, as far as they have come."""

    passes: dict[int, list[tuple[PassPoint, float]]] = field(default_factory=dict[int, list[tuple[PassPoint, float]]])
    """By core, in the order they were measured."""
    pushes: dict[int, list[float]] = field(default_factory=dict[int, list[float]])
    """By bytes."""

    def pass_samples(self) -> tuple[PassSample, ...]:
        return tuple(
            PassSample(shape=point.shape, seconds=seconds, source=PASSES)
            for point, seconds in sorted(self.undisturbed_s().items(), key=lambda item: item[0].sort_key)
        )

    def undisturbed_s(self) -> dict[PassPoint, float]:
        """What a pass of each point takes on a core that nobody disturbs."""
        of_point: dict[PassPoint, list[float]] = {}
        for point, seconds in self._all_passes():
            of_point.setdefault(point, []).append(seconds)
        return {point: percentile(seconds, UNDISTURBED_PERCENT) for point, seconds in of_point.items()}

    def deviations(self) -> tuple[float, ...]:
        """Of each pass, what it took of what its point takes undisturbed."""
        undisturbed_s = self.undisturbed_s()
        return tuple(round(seconds / undisturbed_s[point], DEVIATION_DECIMALS) for point, seconds in self._all_passes())

    def _all_passes(self) -> list[tuple[PassPoint, float]]:
        """One core after the other."""
        return [timed for of_core in self.passes.values() for timed in of_core]

    def push_samples(self) -> tuple[PushSample, ...]:
        return tuple(
            PushSample(num_bytes=num_bytes, seconds=statistics.median(seconds), source=PUSHES)
            for num_bytes, seconds in self.pushes.items()
        )


async def measure_passes(plan: ProfilePlan, timings: Timings, *, on_run: Callable[[str], None]) -> KvSharding:
    """Fills `timings`, so that what has been measured is there when this is interrupted; returns what a push moves.

    Raises: `ConfigError` for a model whose context is too short; `InternalError` when the engine fails.
    """
    async with AsyncExitStack() as stack:
        meters: list[PassMeter] = []
        for cpu in plan.cpus:
            meters.append(await PassMeter.start(plan, cpu))
            stack.push_async_callback(meters[-1].aclose)
            await meters[-1].seconds(max(plan.points, key=lambda point: point.chunk_tokens))
        for repetition in range(plan.repetitions):
            on_run(f"passes, {repetition + 1} of {plan.repetitions}: {len(plan.points)} shapes")
            await asyncio.gather(*(_measure_once(plan, meter, repetition, timings) for meter in meters))
        return meters[0].sharding


async def _measure_once(plan: ProfilePlan, meter: "PassMeter", repetition: int, timings: Timings) -> None:
    """All points on one core."""
    order: list[int] = np.random.default_rng((plan.seed, repetition, meter.cpu)).permutation(len(plan.points)).tolist()
    for point in (plan.points[index] for index in order):
        # Measured first: an interruption leaves no point without a time.
        seconds = await meter.seconds(point)
        timings.passes.setdefault(meter.cpu, []).append((point, seconds))


def measure_pushes(plan: ProfilePlan, sharding: KvSharding, timings: Timings, *, on_run: Callable[[str], None]) -> None:
    """As `measure_passes`. Raises: `FabricError` and `HandoffTimeout` too."""
    for repetition in range(plan.repetitions):
        on_run(f"pushes over {plan.provider}, {repetition + 1} of {plan.repetitions}")
        for num_pages in push_pages(max_prompt_tokens=plan.max_prompt_tokens, page_slots=PAGE_SLOTS):
            run = PushRun(provider=plan.provider, source=sharding, target=sharding, num_pages=num_pages, num_rounds=1)
            # GB/s of one round: the way back to its seconds.
            seconds = run.num_bytes / (measure_push_run(run) * 1e9)
            timings.pushes.setdefault(run.num_bytes, []).append(seconds)


def sum_up(plan: ProfilePlan, timings: Timings) -> Profile:
    """The fitted model, and how far off it is on samples held out by the plan's seed.

    Requires: a whole measurement.
    """
    machine, commit = this_machine(), this_commit()
    date = this_instant()
    passes, pushes = timings.pass_samples(), timings.push_samples()
    provenance = f"pdserve profile, {date}, {machine.cpu}, commit {commit or 'unknown'}"

    def source(what: str) -> Source:
        made_by = f"pdserve profile: {what}, {plan.repetitions} repetitions, seed {plan.seed}"
        return Source(made_by=made_by, date=date, machine=_in_words(machine), commit=commit)

    return Profile(
        subject=f"{plan.model_dir.name}, float32, a core each worker, KV over {plan.provider}",
        sources={
            PASSES: source(f"passes on cores {format_cpu_list(plan.cpus)} at once"),
            PUSHES: source(f"pushes over {plan.provider} on this host"),
        },
        passes=passes,
        pushes=pushes,
        model=msgspec.structs.replace(
            fit_model(passes, push_bytes_s=fit_push(pushes), provenance=provenance), deviations=timings.deviations()
        ),
        accuracy=held_out_accuracy(passes, pushes, seed=plan.seed),
    )


def _in_words(machine: Machine) -> str:
    return (
        f"{machine.cpu}, {machine.num_cpus} cores, {machine.memory_bytes / GIB:.0f} GiB, Linux {machine.kernel}, "
        f"Python {machine.python}"
    )


class PassMeter:
    """Runs passes through the same client that a worker uses, so that the way to the rank process counts too."""

    def __init__(self, engine: RankEngine, cpu: int) -> None:
        self.cpu = cpu
        self._engine = engine
        self._next_pass_index = 0
        self._next_sequence_id = 0
        self._ended: list[SequenceId] = []
        # Pages that were never written are not memory yet, and reading them would cost nothing.
        values = np.frombuffer(host_buffer(engine.kv_regions[0]), dtype=np.float32)
        values[:] = np.random.default_rng(0).standard_normal(len(values), dtype=np.float32)

    @classmethod
    async def start(cls, plan: ProfilePlan, cpu: int) -> "PassMeter":
        """Raises: `ConfigError` when the model's context is too short for the plan."""
        engine = await start_engine(
            EngineSpec(
                model_dir=str(plan.model_dir),
                num_pages=max(point.num_pages(page_slots=PAGE_SLOTS) for point in plan.points),
                page_slots=PAGE_SLOTS,
                num_tail_slots=1,
                num_threads=1,
                cpus=(cpu,),
            )
        )
        longest = max(max(point.chunk_start + point.chunk_tokens, point.context + 1) for point in plan.points)
        if longest > engine.info.max_model_len:
            await engine.close()
            raise ConfigError(
                f"--max-prompt {plan.max_prompt_tokens} measures contexts of {longest} tokens, the model's is "
                f"{engine.info.max_model_len}; choose {engine.info.max_model_len * 4 // 5} or less"
            )
        return cls(engine, cpu)

    @property
    def sharding(self) -> KvSharding:
        return self._engine.info.sharding

    async def seconds(self, point: PassPoint) -> float:
        """Of one pass. The sampler gets to know the sequences in a pass before it, which does not count."""
        sequence_ids = self._new_ids(point.num_sequences)
        decodes = tuple(self._decode_chunk(point, index, each) for index, each in enumerate(sequence_ids))
        if decodes:
            await self._run(decodes, news=[_new_sequence(each) for each in sequence_ids])
            self._ended = sequence_ids
        chunks = (*self._prefill_chunks(point), *decodes)
        started_ns = time.monotonic_ns()
        await self._run(chunks)
        elapsed_ns = time.monotonic_ns() - started_ns
        return elapsed_ns / NS_PER_S

    def _prefill_chunks(self, point: PassPoint) -> tuple[Chunk, ...]:
        if not point.chunk_tokens:
            return ()
        num_pages = point.num_pages(page_slots=PAGE_SLOTS)
        first = point.num_sequences * point.pages_per_sequence(page_slots=PAGE_SLOTS)
        [sequence_id] = self._new_ids(1)
        return (
            Chunk(
                sequence_id=sequence_id,
                start=point.chunk_start,
                token_ids=tuple(1 + offset % VOCABULARY for offset in range(point.chunk_tokens)),
                page_indices=tuple(range(first, num_pages)),
                samples=False,
            ),
        )

    def _decode_chunk(self, point: PassPoint, index: int, sequence_id: SequenceId) -> Chunk:
        num_pages = point.pages_per_sequence(page_slots=PAGE_SLOTS)
        return Chunk(
            sequence_id=sequence_id,
            start=point.context,
            token_ids=(1 + index % VOCABULARY,),
            page_indices=tuple(range(index * num_pages, (index + 1) * num_pages)),
            samples=True,
        )

    def _new_ids(self, count: int) -> list[SequenceId]:
        first = self._next_sequence_id
        self._next_sequence_id += count
        return [SequenceId(first + index) for index in range(count)]

    async def _run(self, chunks: tuple[Chunk, ...], *, news: Sequence[NewSequence] = ()) -> None:
        ended = tuple(self._ended) if news else ()
        batch = Batch(pass_index=self._next_pass_index, chunks=chunks, new_sequences=tuple(news), ended_sequences=ended)
        self._next_pass_index += 1
        await self._engine.run(batch)

    async def aclose(self) -> None:
        await self._engine.close()


def _new_sequence(sequence_id: SequenceId) -> NewSequence:
    sampling = SamplingParams(max_tokens=2, temperature=0.0)
    return NewSequence(sequence_id=sequence_id, prompt_token_ids=(1,), output_token_ids=(), sampling=sampling)
