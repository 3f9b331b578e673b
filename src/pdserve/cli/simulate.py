"""`pdserve simulate`: worlds of workers, a gateway and clients on a virtual clock, one a seed; or a fleet."""

import argparse
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial

from pdserve.cli.simulate_fleet import add_fleet_flags, is_fleet, run_fleet
from pdserve.cli.subparsers import Subparsers
from pdserve.errors import ConfigError
from pdserve.simulate.planted import Plant
from pdserve.simulate.simulation import Outcome, simulate
from pdserve.units import div_ceil

MAX_SHOWN = 3
"""Violations that are explained; the others are counted."""

SEEDS_A_TASK = 20


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "simulate", help="run the product's code in worlds of faults, by seed, or in a fleet", allow_abbrev=False
    )
    parser.add_argument(
        "--faults", action="store_true", help="kill, hang, restart and cut off; without it the worlds are calm"
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--seeds", type=int, default=100, metavar="N", help="run the seeds 0 to N-1 (default: 100)")
    which.add_argument("--seed", type=int, metavar="S", help="run this seed alone")
    parser.add_argument("--first-seed", type=int, default=0, metavar="S", help="begin with this seed (default: 0)")
    parser.add_argument("--jobs", type=int, metavar="N", help="processes (default: one a core)")
    parser.add_argument(
        "--plant", choices=[plant.value for plant in Plant], help="plant a bug, to see that it is found"
    )
    add_fleet_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    """1: a rule was broken."""
    if is_fleet(arguments):
        return run_fleet(arguments)
    if arguments.seeds < 1 or (arguments.jobs is not None and arguments.jobs < 1):
        raise ConfigError("--seeds and --jobs must be at least 1")
    if arguments.seed is not None and arguments.first_seed:
        raise ConfigError("--seed is one seed alone; --first-seed goes with --seeds")
    plant = None if arguments.plant is None else Plant(arguments.plant)
    first = arguments.first_seed if arguments.seed is None else arguments.seed
    seeds = range(first, first + (arguments.seeds if arguments.seed is None else 1))
    num_requests = num_faults = num_violations = 0
    for outcome in _outcomes(seeds, with_faults=arguments.faults, plant=plant, num_jobs=arguments.jobs):
        num_requests += outcome.num_requests
        num_faults += outcome.num_faults
        if outcome.violation is not None:
            num_violations += 1
            if num_violations <= MAX_SHOWN:
                _show(simulate(outcome.seed, with_faults=arguments.faults, plant=plant, explains=True), arguments)
    verdict = "failed" if num_violations else "ok"
    print(
        f"simulate: {verdict} seeds={len(seeds)} requests={num_requests} faults={num_faults} "
        f"violations={num_violations}"
    )
    return 1 if num_violations else 0


def _outcomes(seeds: range, *, with_faults: bool, plant: Plant | None, num_jobs: int | None) -> Iterator[Outcome]:
    run_one = partial(simulate, with_faults=with_faults, plant=plant, explains=False)
    num_processes = min(num_jobs or len(os.sched_getaffinity(0)), div_ceil(len(seeds), SEEDS_A_TASK))
    if num_processes == 1:
        yield from map(run_one, seeds)
        return
    with ProcessPoolExecutor(num_processes) as pool:
        yield from pool.map(run_one, seeds, chunksize=SEEDS_A_TASK)


def _show(outcome: Outcome, arguments: argparse.Namespace) -> None:
    assert outcome.violation is not None
    print(f"seed {outcome.seed}: {outcome.violation.rule}")
    if outcome.violation.about:
        print(f"  about {outcome.violation.about}")
    for line in outcome.log:
        print(f"  {line}")
    faults = " --faults" if arguments.faults else ""
    plant = f" --plant {arguments.plant}" if arguments.plant else ""
    print(f"  again: pdserve simulate{faults}{plant} --seed {outcome.seed}")
