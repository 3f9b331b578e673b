"""`pdserve bench-engine`: the engine alone on one core, beside `transformers` and beside the core's own limits."""

import argparse
import asyncio
import os
from pathlib import Path

from pdserve.bench.engine import DEFAULT_REPETITIONS, EngineReport, EngineRow, run_engine_bench
from pdserve.cli.out_file import write_json
from pdserve.cli.progress import say
from pdserve.cli.subparsers import Subparsers
from pdserve.errors import ConfigError


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "bench-engine", help="measure the engine alone against transformers and the core", allow_abbrev=False
    )
    parser.add_argument("--model", help="model directory or hub id; default: the default model")
    parser.add_argument("--cpu", type=int, help="the core to measure on; default: the last one that may be used")
    parser.add_argument("--repetitions", type=int, default=DEFAULT_REPETITIONS, help="default: %(default)s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there too")


def run(arguments: argparse.Namespace) -> int:
    from pdserve.model.source import resolve_model

    if arguments.repetitions < 1:
        raise ConfigError(f"--repetitions must be 1 or more, not {arguments.repetitions}")
    cpu = max(os.sched_getaffinity(0)) if arguments.cpu is None else arguments.cpu
    if cpu not in os.sched_getaffinity(0):
        raise ConfigError(f"--cpu {cpu}: this process may use {sorted(os.sched_getaffinity(0))}")
    model_dir = resolve_model(arguments.model).dir
    report = asyncio.run(run_engine_bench(model_dir, cpu=cpu, repetitions=arguments.repetitions, on_run=say))
    print(format_report(report))
    if arguments.json is not None:
        write_json(arguments.json, report)
    return 0


def format_report(report: EngineReport) -> str:
    """A table for people: tokens a second, and the ratios to both in the same run."""
    header = (
        f"{'point':<30} {'tokens/s':>9} {'spread':>7} {'transformers':>13} {'ratio':>6} {'limit':>8} {'of limit':>9}"
    )
    machine = f"{report.machine.cpu}, one core, float32, commit {report.commit or 'unknown'}; medians"
    return "\n".join([header, *(_format_row(row) for row in report.rows), *report.skipped, machine])


def _format_row(row: EngineRow) -> str:
    point = f"{row.phase.value} batch {row.batch} context {row.context}"
    return (
        f"{point:<30} {row.tokens_per_s:>9.1f} {row.spread:>7.0%} {_or_dash(row.transformers_tokens_per_s, '.1f'):>13} "
        f"{_or_dash(row.ratio, '.2f'):>6} {_or_dash(row.limit_tokens_per_s, '.1f'):>8} "
        f"{_or_dash(row.limit_ratio, '.2f'):>9}"
    )


def _or_dash(value: float | None, spec: str) -> str:
    return "-" if value is None else format(value, spec)
