"""`pdserve plan`: how many workers of which parallelism a load needs on given hardware, and why."""

import argparse
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING

from pdserve.cli.drafting import add_drafting_flag, requested_drafting
from pdserve.cli.plan_load import add_load_flags, check_load_flags, planned_load
from pdserve.cli.plan_table import format_plan
from pdserve.cli.progress import say
from pdserve.cli.subparsers import Subparsers
from pdserve.errors import ConfigError
from pdserve.workload.objective import parse_objective

if TYPE_CHECKING:
    from pdserve.planner.goal import Goal

SLO_LIMITS = ("ttft", "tpot")
"""A plan has both; its bounds know nothing of stalls."""


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "plan", help="size prefill and decode pools, or a colocated one, for a load", allow_abbrev=False
    )
    parser.add_argument("--hardware", required=True, metavar="NAME", help="accelerator, for example h200")
    parser.add_argument("--model", required=True, metavar="NAME", help="for example deepseek-r1")
    add_load_flags(parser)
    parser.add_argument("--slo", required=True, metavar="SPEC", help="ttft=SECONDS,tpot=SECONDS")
    parser.add_argument(
        "--attainment", type=float, default=0.9, metavar="SHARE", help="of requests within the SLO (default: 0.9)"
    )
    add_drafting_flag(parser)
    parser.add_argument("--max-gpus", type=int, default=1024, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--gpu-hour-cost", type=float, metavar="COST", help="of one GPU, for the cost of a token")
    parser.add_argument("--jobs", type=int, metavar="N", help="processes that simulate (default: one a core)")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw what was simulated there, as PNG")
    parser.add_argument(
        "--tables", type=Path, metavar="DIR", help="tables of benchmarks/gpu_tables.py; default: those of pdserve"
    )


def run(arguments: argparse.Namespace) -> int:
    """1: no fleet meets the SLO; what comes closest is printed."""
    from pdserve.planner.parallel import search_in_parallel

    goal = _goal(arguments)
    num_processes = arguments.jobs or len(os.sched_getaffinity(0))
    plan = search_in_parallel(goal, num_processes=num_processes, on_run=say)
    print(format_plan(plan, gpu_hour_cost=arguments.gpu_hour_cost))
    if arguments.plot is not None:
        from pdserve.cli.plan_plot import draw_plan

        draw_plan(plan, arguments.plot)
    return 0 if plan.best.meets(goal) else 1


def _goal(arguments: argparse.Namespace) -> "Goal":
    """Raises: `ConfigError` for anything that can't be planned for."""
    from pdserve.perfmodel.hardware import hardware
    from pdserve.perfmodel.model_shape import model_shape
    from pdserve.planner.goal import Goal

    check_load_flags(arguments)
    _require(0 < arguments.attainment <= 1, f"--attainment must be over 0 and at most 1, not {arguments.attainment:g}")
    _require(arguments.max_gpus >= 1, f"--max-gpus must be 1 or more, not {arguments.max_gpus}")
    _require(arguments.jobs is None or arguments.jobs >= 1, f"--jobs must be 1 or more, not {arguments.jobs}")
    cost = arguments.gpu_hour_cost
    _require(cost is None or 0 < cost < math.inf, "--gpu-hour-cost must be over 0")
    plot, tables = arguments.plot, arguments.tables
    _require(plot is None or plot.parent.is_dir(), f"--plot {plot}: its directory is missing; make it first")
    _require(tables is None or tables.is_dir(), f"--tables {tables} is not a directory")
    drafting = requested_drafting(arguments.speculate)
    slo = parse_objective(arguments.slo, limits=SLO_LIMITS)
    if slo.ttft_s is None or slo.tpot_s is None:
        raise ConfigError(f"--slo {arguments.slo}: a plan needs both limits, as in ttft=2,tpot=0.02")
    return Goal(
        hardware=hardware(arguments.hardware),
        shape=model_shape(arguments.model),
        workload=planned_load(arguments),
        ttft_s=slo.ttft_s,
        tpot_s=slo.tpot_s,
        attainment=arguments.attainment,
        max_accelerators=arguments.max_gpus,
        tables=tables,
        drafting=drafting,
    )


def _require(is_met: bool, message: str) -> None:
    if not is_met:
        raise ConfigError(message)
