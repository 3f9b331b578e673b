"""`pdserve plan`: how many workers of which parallelism a load needs on given hardware, and why."""

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING

from pdserve.cli.plan_table import format_plan
from pdserve.cli.serve import say
from pdserve.cli.subparsers import Subparsers
from pdserve.errors import ConfigError

if TYPE_CHECKING:
    from pdserve.planner.goal import Goal

SLO_KEYS = ("ttft", "tpot")
MIN_REQUESTS = 50
"""Fewer do not tell nine of ten from eight of ten."""


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "plan", help="size prefill and decode pools, or a colocated one, for a load", allow_abbrev=False
    )
    parser.add_argument("--hardware", required=True, metavar="NAME", help="accelerator, for example h200")
    parser.add_argument("--model", required=True, metavar="NAME", help="for example deepseek-r1")
    parser.add_argument(
        "--workload", required=True, metavar="SPEC", help="prompt=TOKENS,output=TOKENS, and cv= and prefix= if wanted"
    )
    parser.add_argument("--rate", type=float, required=True, metavar="R", help="requests a second")
    parser.add_argument("--slo", required=True, metavar="SPEC", help="ttft=SECONDS,tpot=SECONDS")
    parser.add_argument(
        "--attainment", type=float, default=0.9, metavar="SHARE", help="of requests within the SLO (default: 0.9)"
    )
    parser.add_argument("--max-gpus", type=int, default=1024, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--gpu-hour-cost", type=float, metavar="COST", help="of one GPU, for the cost of a token")
    parser.add_argument(
        "--requests", type=int, default=300, metavar="N", help="to simulate on each fleet (default: %(default)s)"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw what was simulated there, as PNG")
    parser.add_argument(
        "--tables", type=Path, metavar="DIR", help="tables of benchmarks/gpu_tables.py; default: those of pdserve"
    )


def run(arguments: argparse.Namespace) -> int:
    """1: no fleet meets the SLO; what comes closest is printed."""
    from pdserve.planner.search import search, simulated

    goal = _goal(arguments)
    plan = search(goal, simulated(arguments.requests), on_run=say)
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
    from pdserve.workload.synthetic import parse_synthetic

    _require(0 < arguments.rate < math.inf, f"--rate must be over 0, not {arguments.rate:g}")
    _require(0 < arguments.attainment <= 1, f"--attainment must be over 0 and at most 1, not {arguments.attainment:g}")
    _require(arguments.max_gpus >= 1, f"--max-gpus must be 1 or more, not {arguments.max_gpus}")
    _require(arguments.requests >= MIN_REQUESTS, f"--requests must be {MIN_REQUESTS} or more, not {arguments.requests}")
    cost = arguments.gpu_hour_cost
    _require(cost is None or 0 < cost < math.inf, "--gpu-hour-cost must be over 0")
    plot, tables = arguments.plot, arguments.tables
    _require(plot is None or plot.parent.is_dir(), f"--plot {plot}: its directory is missing; make it first")
    _require(tables is None or tables.is_dir(), f"--tables {tables} is not a directory")
    ttft_s, tpot_s = _slo(arguments.slo)
    return Goal(
        hardware=hardware(arguments.hardware),
        shape=model_shape(arguments.model),
        workload=parse_synthetic(f"{arguments.workload},rate={arguments.rate}"),
        ttft_s=ttft_s,
        tpot_s=tpot_s,
        attainment=arguments.attainment,
        max_accelerators=arguments.max_gpus,
        tables=tables,
    )


def _slo(text: str) -> tuple[float, float]:
    """Raises: `ConfigError`."""
    values: dict[str, float] = {}
    for item in text.split(","):
        key, _, value = (part.strip() for part in item.partition("="))
        _require(key in SLO_KEYS and key not in values, f"--slo {text}: write ttft=SECONDS,tpot=SECONDS")
        try:
            values[key] = float(value)
        except ValueError:
            values[key] = math.nan
        _require(0 < values[key] < math.inf, f"--slo {key}={value} must be seconds, over 0")
    _require(len(values) == len(SLO_KEYS), f"--slo {text}: write both, as in ttft=2,tpot=0.02")
    return values["ttft"], values["tpot"]


def _require(is_met: bool, message: str) -> None:
    if not is_met:
        raise ConfigError(message)
