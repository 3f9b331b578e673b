#!/usr/bin/env python3
"""pdserve's engine beside vLLM's, each alone on the same core with one thread, in float32, in turn.

`setup` comes before. Prefill: prompts of 512 tokens, one at a time. Decode: steps of 1, 8 and 32 sequences; their
prompts are not in the time. The file is written after every repetition.
"""

import argparse
import asyncio
import os
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec
from vllm_server import FOLDER, require_installed
from vllm_stepper import VllmStepper

from pdserve.bench.engine import OwnEngine, Phase, Point
from pdserve.bench.experiment.cpu_time import cpu_times, shares
from pdserve.bench.provenance import Machine, this_commit, this_instant, this_machine
from pdserve.cli.out_file import require_folder_of, write_json
from pdserve.engine.client import start_engine
from pdserve.engine.port import EngineSpec
from pdserve.errors import ConfigError, PdserveError
from pdserve.model.source import resolve_model
from pdserve.units import div_ceil

OUT = FOLDER.parents[1] / "docs" / "results" / "peers_engine.json"
PAGE_SLOTS = 16
MAX_CONTEXT = 640
"""Of the sequences that decode: more than the steps of any sensible number of repetitions add."""
AIMS = {Phase.PREFILL: 1.0, Phase.DECODE: 1.2}
"""Of vLLM's speed."""
EXPECTED = "about 5 minutes on a quiet machine, one of them until vLLM has started; two more the first time"


class PointResult(msgspec.Struct, frozen=True, kw_only=True):
    """Speeds in tokens a second, by repetition: ours and vLLM's of one repetition follow each other."""

    phase: Phase
    batch: int
    context: int
    steps: int
    pdserve: tuple[float, ...] = ()
    vllm: tuple[float, ...] = ()
    foreign_shares: tuple[float, ...] = ()
    """Of the machine's CPU time during a repetition: of other processes, and stolen by the hypervisor."""

    def with_repetition(self, ours: float, theirs: float, foreign_share: float) -> "PointResult":
        return msgspec.structs.replace(
            self,
            pdserve=(*self.pdserve, ours),
            vllm=(*self.vllm, theirs),
            foreign_shares=(*self.foreign_shares, foreign_share),
        )

    @property
    def ratios(self) -> list[float]:
        return [ours / theirs for ours, theirs in zip(self.pdserve, self.vllm, strict=True)]


class Report(msgspec.Struct, frozen=True, kw_only=True):
    machine: Machine
    commit: str | None
    started: str
    model: str
    vllm: str
    configuration: dict[str, str]
    points: tuple[PointResult, ...]


def main() -> int:
    arguments = parsed()
    try:
        check(arguments)
        asyncio.run(measure(arguments))
    except ConfigError as error:
        print(f"engine_speed: {error.message}", file=sys.stderr)
        return 2
    except PdserveError as error:
        print(f"engine_speed: {type(error).__name__}: {error.message}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", type=int, help="the core of both; default: the last that may be used")
    parser.add_argument("--repetitions", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--prefill-tokens", type=int, default=512, help="of a prompt (default: %(default)s)")
    parser.add_argument("--context", type=int, default=256, help="of sequences that decode (default: %(default)s)")
    parser.add_argument("--batches", default="1,8,32", help="of decode steps (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=OUT, metavar="FILE", help="default: %(default)s")
    return parser.parse_args()


def check(arguments: argparse.Namespace) -> None:
    """Raises: `ConfigError`."""
    require_installed()
    require_folder_of("--out", arguments.out)
    if arguments.cpu not in (None, *os.sched_getaffinity(0)):
        raise ConfigError(f"--cpu {arguments.cpu}: this process may use {sorted(os.sched_getaffinity(0))}")
    if arguments.repetitions < 1:
        raise ConfigError(f"--repetitions must be 1 or more, not {arguments.repetitions}")
    if not 1 <= arguments.prefill_tokens <= MAX_CONTEXT or not 1 <= arguments.context <= MAX_CONTEXT // 2:
        raise ConfigError(f"--prefill-tokens must be 1 to {MAX_CONTEXT}, and --context 1 to {MAX_CONTEXT // 2}")
    if not all(batch.isdecimal() and 1 <= int(batch) <= 64 for batch in arguments.batches.split(",")):
        raise ConfigError(f"--batches must be numbers from 1 to 64 such as 1,8,32, not {arguments.batches!r}")


def points_of(arguments: argparse.Namespace) -> list[Point]:
    """Steps of one to three seconds together."""
    prefill = Point(phase=Phase.PREFILL, batch=1, context=arguments.prefill_tokens, steps=2)
    batches = map(int, arguments.batches.split(","))
    return [prefill, *(decode_point(batch, context=arguments.context) for batch in batches)]


def decode_point(batch: int, *, context: int) -> Point:
    return Point(phase=Phase.DECODE, batch=batch, context=context, steps=max(10, 30 - batch))


async def measure(arguments: argparse.Namespace) -> None:
    """Prints the table of what is there, also when something stops it."""
    source = resolve_model(None)
    cpu = max(os.sched_getaffinity(0)) if arguments.cpu is None else arguments.cpu
    points = points_of(arguments)
    say(f"{len(points)} points, {arguments.repetitions} repetitions: {EXPECTED}")
    # This process too, which makes up our engine's batches: so neither of the two has more than the core.
    machine = this_machine()
    os.sched_setaffinity(0, {cpu})
    async with AsyncExitStack() as stack:
        say("starting vLLM's engine")
        vllm = await VllmStepper.start(source.dir, cpu=cpu)
        stack.push_async_callback(vllm.close)
        say("starting pdserve's engine")
        own = OwnEngine(await start_engine(engine_spec(source.dir, points, cpu=cpu)))
        stack.push_async_callback(own.close)
        report = Report(
            machine=machine,
            commit=this_commit(),
            started=this_instant(),
            model=source.name,
            vllm=vllm.version,
            configuration={"cpu": str(cpu), "threads": "1", "dtype": "float32", "vllm": vllm.configuration},
            points=(),
        )
        try:
            for point in points:
                done = report.points
                result = PointResult(phase=point.phase, batch=point.batch, context=point.context, steps=point.steps)
                say(f"{name_of(point)}: vLLM's prompts")
                await vllm.measure(msgspec.structs.replace(point, steps=1))
                for repetition in range(arguments.repetitions):
                    say(f"{name_of(point)}, repetition {repetition + 1} of {arguments.repetitions}")
                    result = result.with_repetition(*await compare(point, own, vllm))
                    report = msgspec.structs.replace(report, points=(*done, result))
                    write_json(arguments.out, report)
        finally:
            print(table(report))


async def compare(point: Point, own: OwnEngine, vllm: VllmStepper) -> tuple[float, float, float]:
    """One repetition: our speed, vLLM's, and the share that others had of the machine."""
    before = cpu_times()
    theirs = await vllm.measure(point)
    at_its_context = msgspec.structs.replace(point, context=min(MAX_CONTEXT, theirs.context))
    ours_s = await own.mean_seconds(at_its_context)
    used = shares(before, cpu_times(), num_cpus=os.cpu_count() or 1)
    return point.num_tokens / ours_s, point.num_tokens / theirs.seconds, used.foreign + used.steal


def engine_spec(model_dir: Path, points: Sequence[Point], *, cpu: int) -> EngineSpec:
    return EngineSpec(
        model_dir=str(model_dir),
        num_pages=max(point.batch for point in points) * div_ceil(MAX_CONTEXT + 1, PAGE_SLOTS),
        page_slots=PAGE_SLOTS,
        num_tail_slots=1,
        num_threads=1,
        cpus=(cpu,),
    )


def table(report: Report) -> str:
    lines = [
        f"{'point':<28} {'pdserve':>9} {'spread':>7} {'vLLM':>9} {'spread':>7} {'ratio':>6} {'of runs':>11} {'aim':>5}"
    ]
    for point in report.points:
        ratios, aim = point.ratios, AIMS[point.phase]
        ratio = statistics.median(ratios)
        lines.append(
            f"{name_of(point):<28} {statistics.median(point.pdserve):>9.1f} {spread(point.pdserve):>7.0%} "
            f"{statistics.median(point.vllm):>9.1f} {spread(point.vllm):>7.0%} {ratio:>6.2f} "
            f"{min(ratios):>5.2f}-{max(ratios):.2f} {aim:>5.1f} {'met' if ratio >= aim else 'missed'}"
        )
    worst = max((share for point in report.points for share in point.foreign_shares), default=0.0)
    lines.append(
        f"tokens/s, medians of {max((len(point.vllm) for point in report.points), default=0)}; spread: greatest less "
        f"least over the median; others had up to {worst:.0%} of the machine"
    )
    lines.append(f"{report.machine.cpu}, one core, float32, {report.vllm}, commit {report.commit or 'unknown'}")
    return "\n".join(lines)


def spread(values: Sequence[float]) -> float:
    return (max(values) - min(values)) / statistics.median(values)


def name_of(point: Point | PointResult) -> str:
    return f"{point.phase.value} batch {point.batch} context {point.context}"


def say(line: str) -> None:
    print(f"engine_speed: {time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
