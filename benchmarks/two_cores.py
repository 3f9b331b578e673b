#!/usr/bin/env python3
"""Two cores, three ways: two colocated workers that take prompts whole (A) or in chunks (A'), or one prefill and one
decode worker (B), at the same arrivals. `docs/benchmarks.md` says what the points and figures are.

The book of results is written after each run; `--resume` goes on with it. Void runs are done again while there is time.
"""

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from pdserve.bench.experiment.book import Book, Reference, load, require_resumable, save
from pdserve.bench.experiment.campaign import Campaign, expected_s, measure_prefill_s
from pdserve.bench.experiment.effects import table
from pdserve.bench.experiment.points import Point, Slo, points_named
from pdserve.bench.experiment.schedule import Run, planned_runs
from pdserve.bench.experiment.sending import send_load
from pdserve.bench.provenance import this_machine
from pdserve.errors import ConfigError, PdserveError
from pdserve.model.source import ModelSource, resolve_model

OUT = Path(__file__).parents[1] / "docs" / "results" / "two_cores.json"
REFERENCE_S = 90.0
"""About what the measurements before the first run take."""


def main() -> int:
    arguments = parsed()
    try:
        points = points_named(arguments.points)
        if arguments.table:
            print(table(load(arguments.out), points))
        else:
            measure(arguments, points)
    except ConfigError as error:
        print(f"two_cores: {error.message}", file=sys.stderr)
        return 2
    except PdserveError as error:
        print(f"two_cores: {type(error).__name__}: {error.message}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def measure(arguments: argparse.Namespace, points: Sequence[Point]) -> None:
    """Prints the table of what is there, also when something stops it. Raises: as `carry_out`."""
    if arguments.out.exists() and not arguments.resume:
        raise ConfigError(f"{arguments.out} is there already: go on with --resume, or choose another --out")
    try:
        asyncio.run(carry_out(arguments, points))
    finally:
        if arguments.out.exists():
            print(table(load(arguments.out), points))


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", default="headline", help="headline, all, or names such as 256/64@0.5")
    parser.add_argument("--seeds", type=int, default=5, help="repetitions, each of other arrivals (default: 5)")
    parser.add_argument("--seconds", type=float, default=60.0, help="of arrivals in each run (default: 60)")
    parser.add_argument(
        "--minutes", type=float, default=55.0, help="begin no run that ends after so many (default: 55)"
    )
    parser.add_argument("--model", help="model directory or hub id; default: the default model")
    parser.add_argument("--out", type=Path, default=OUT, metavar="FILE", help="the book (default: %(default)s)")
    parser.add_argument("--resume", action="store_true", help="go on with the book")
    parser.add_argument("--table", action="store_true", help="print the table of the book, run nothing")
    return parser.parse_args()


async def carry_out(arguments: argparse.Namespace, points: Sequence[Point]) -> None:
    started_s = time.monotonic()
    if arguments.seeds < 1 or arguments.seconds <= 0 or arguments.minutes <= 0:
        raise ConfigError("--seeds must be 1 or more, and --seconds and --minutes over 0")
    source = resolve_model(arguments.model)
    runs = planned_runs(points, num_seeds=arguments.seeds)
    book = await begun(arguments, source, runs)
    save(book, arguments.out)
    campaign = Campaign(
        model_dir=source.dir,
        model_name=source.name,
        send=send_load,
        book_path=arguments.out,
        on_progress=say,
        deadline_s=started_s + 60 * arguments.minutes,
    )
    await campaign.carry_out(book, runs)


async def begun(arguments: argparse.Namespace, source: ModelSource, runs: Sequence[Run]) -> Book:
    """The book to go on with, or a new one; with the prefill time of every point."""
    fresh = Book(
        machine=this_machine(),
        model=source.name,
        cpus=two_cores(),
        seconds=arguments.seconds,
        slo=Slo(),
        reference=Reference(prefill_s={}),
    )
    book = load(arguments.out) if arguments.resume and arguments.out.exists() else fresh
    require_resumable(book, fresh)
    num_runs = len(book.missing(runs))
    minutes = (REFERENCE_S + expected_s(num_runs, seconds=arguments.seconds)) / 60
    say(f"{num_runs} runs of {arguments.seconds:g} s: about {minutes:.0f} minutes")
    lengths = sorted({run.point.num_prompt_tokens for run in runs} - set(book.reference.prefill_s))
    if not lengths:
        return book
    say(f"measuring prefills of {', '.join(map(str, lengths))} tokens")
    return book.with_prefills(await measure_prefill_s(source.dir, lengths, cpu=book.cpus[0]))


def two_cores() -> tuple[int, int]:
    """Raises: `ConfigError`."""
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 2:
        raise ConfigError("the experiment needs two cores, and this process may use one: see taskset")
    return cpus[0], cpus[1]


def say(line: str) -> None:
    print(f"two_cores: {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
