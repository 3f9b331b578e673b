"""`pdserve profile`: measures the engine and the fabric here, and fits a performance model to them."""

import argparse
import asyncio
import os
from pathlib import Path
from typing import TYPE_CHECKING

from pdserve.bench.profile_points import pass_points
from pdserve.cli.out_file import require_folder_of
from pdserve.cli.profile_table import format_accuracy, format_profile, format_timings
from pdserve.cli.progress import say
from pdserve.cli.subparsers import Subparsers
from pdserve.cli.worker import parse_cpus, require_cpus
from pdserve.errors import ConfigError
from pdserve.perfmodel.fit import MAX_MAPE
from pdserve.perfmodel.profile import encode_profile

if TYPE_CHECKING:
    from pdserve.bench.profile import ProfilePlan

NUM_CORES = 2
"""What the smallest fleet has: a prefill and a decode worker."""


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "profile", help="measure the engine and the fabric here, and fit a performance model", allow_abbrev=False
    )
    parser.add_argument("--model-dir", metavar="DIR", help="model directory or hub id; default: the default model")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="write the profile there")
    parser.add_argument(
        "--cpus",
        type=parse_cpus,
        metavar="LIST",
        help="cores to measure on at once, such as 0,2-5; default: the last two that may be used",
    )
    parser.add_argument(
        "--provider", choices=("tcp", "shm"), default="tcp", help="the fabric that pushes go over (default: tcp)"
    )
    parser.add_argument(
        "--max-prompt", type=int, default=1024, metavar="TOKENS", help="the longest prompt (default: %(default)s)"
    )
    parser.add_argument(
        "--max-batch", type=int, default=32, metavar="N", help="the largest decode batch (default: %(default)s)"
    )
    parser.add_argument("--repetitions", type=int, default=5, metavar="N", help="of each point (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the order, and of what is held out (default: 0)")


def run(arguments: argparse.Namespace) -> int:
    """1: the model is too far off what was measured, though the file is written."""
    from pdserve.bench.profile import Timings, measure_passes, measure_pushes, sum_up

    plan = _plan(arguments)
    timings = Timings()
    try:
        sharding = asyncio.run(measure_passes(plan, timings, on_run=say))
        # Outside the event loop, whose first Ctrl-C would wait for the end of a push.
        measure_pushes(plan, sharding, timings, on_run=say)
    except KeyboardInterrupt:
        print(format_timings(timings))
        say("interrupted: nothing is fitted to half a measurement, and no file is written")
        raise
    profile = sum_up(plan, timings)
    print(format_profile(profile))
    arguments.out.write_bytes(encode_profile(profile))
    is_good = profile.accuracy.worst() <= MAX_MAPE
    print(f"profile: {'ok' if is_good else 'failed'} {format_accuracy(profile.accuracy)}")
    if not is_good:
        say(
            f"the model is off by more than {MAX_MAPE:.0%} on what it was not fitted to: measure again while nothing "
            "else runs on this machine, or with more --repetitions"
        )
    return 0 if is_good else 1


def _plan(arguments: argparse.Namespace) -> "ProfilePlan":
    """Raises: `ConfigError` for flags that make no sense, before anything is started."""
    from pdserve.bench.profile import ProfilePlan
    from pdserve.model.source import resolve_model

    if arguments.repetitions < 1:
        raise ConfigError(f"--repetitions must be 1 or more, not {arguments.repetitions}")
    if arguments.seed < 0:
        raise ConfigError(f"--seed must be 0 or more, not {arguments.seed}")
    cpus = arguments.cpus or tuple(sorted(os.sched_getaffinity(0))[-NUM_CORES:])
    require_cpus(cpus)
    require_folder_of("--out", arguments.out)
    pass_points(max_prompt_tokens=arguments.max_prompt, max_batch=arguments.max_batch)
    return ProfilePlan(
        model_dir=resolve_model(arguments.model_dir).dir,
        cpus=cpus,
        provider=arguments.provider,
        max_prompt_tokens=arguments.max_prompt,
        max_batch=arguments.max_batch,
        repetitions=arguments.repetitions,
        seed=arguments.seed,
    )
