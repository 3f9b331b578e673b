"""`pdserve simulate --workers N`: a fleet on a virtual clock, with the times of a performance model."""

import argparse
import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pdserve.bench.load.result import LoadResult
from pdserve.bench.report.compare import read_result
from pdserve.cli.drafting import add_drafting_flag, requested_drafting
from pdserve.cli.simulate_progress import FleetProgress
from pdserve.cli.simulate_validation import compare_runs, workload_of
from pdserve.cli.workload import load_named
from pdserve.config.role import Role
from pdserve.errors import ConfigError
from pdserve.percentile import percentile_of_sorted
from pdserve.perfmodel.fitted import affine_model
from pdserve.perfmodel.port import PerfModel
from pdserve.perfmodel.profile import read_profile
from pdserve.simulate.fleet.capacity import capacity_per_s
from pdserve.simulate.fleet.plan import FleetPlan, PoolPlan
from pdserve.simulate.fleet.result import FleetResult
from pdserve.simulate.fleet.simulation import simulate_fleet
from pdserve.simulate.fleet.validation import figures_of
from pdserve.units import MIB
from pdserve.workload.request import WorkloadRequest

DEFAULT_PREFILL_SHARE = 0.25
DEFAULT_REQUESTS = 10_000
DEFAULT_PROMPT_TOKENS, DEFAULT_OUTPUT_TOKENS = 512, 64
DEFAULT_LOAD_SHARE = 0.6
"""Of the fleet's capacity, where no rate is given."""

DEFAULT_CHUNK_TOKENS = 2048
DEFAULT_KV_TOKENS = 65_536

EXIT_STATUS = {"ok": 0, "failed": 1, "interrupted": 130}

ASSUMED = affine_model(
    provenance="assumed, not measured: 6 ms a pass, 50 us a token and 50 us more a decoded one, links of 100 Gbit/s",
    pass_s=6e-3,
    token_s=50e-6,
    decode_token_s=50e-6,
    push_s=50e-6,
    push_byte_s=1 / 12.5e9,
)


def add_fleet_flags(parser: argparse.ArgumentParser) -> None:
    fleet = parser.add_argument_group("a fleet", "with --workers, or with --prefill-workers and --decode-workers")
    fleet.add_argument("--workers", type=int, metavar="N", help="simulate a fleet of so many workers, without faults")
    fleet.add_argument(
        "--prefill-share", type=float, metavar="X", help=f"of the workers (default: {DEFAULT_PREFILL_SHARE:g})"
    )
    fleet.add_argument("--prefill-workers", type=int, metavar="P", help="so many that prefill")
    fleet.add_argument("--decode-workers", type=int, metavar="D", help="so many that decode")
    fleet.add_argument("--colocated", action="store_true", help="all workers prefill and decode their own requests")
    fleet.add_argument(
        "--requests", type=int, metavar="M", help=f"how many, the first of a trace (default: {DEFAULT_REQUESTS})"
    )
    load = fleet.add_mutually_exclusive_group()
    load.add_argument("--workload", metavar="synthetic:SPEC", help="as in synthetic:prompt=512,output=64,rate=100")
    load.add_argument("--trace", metavar="FORMAT:FILE", help="mooncake, azure or burstgpt, as their publishers ship it")
    load.add_argument("--validate", type=Path, metavar="RESULT.json", help="of `pdserve bench`: run it again, compare")
    fleet.add_argument(
        "--rate", type=float, metavar="R", help=f"requests a second (default: {DEFAULT_LOAD_SHARE:g} of the capacity)"
    )
    fleet.add_argument("--perf", type=Path, metavar="FILE", help="a profile, as `pdserve profile` writes it")
    fleet.add_argument("--chunk-tokens", type=int, default=DEFAULT_CHUNK_TOKENS, metavar="N", help="as of a worker")
    fleet.add_argument("--kv-tokens", type=int, default=DEFAULT_KV_TOKENS, metavar="N", help="as of a worker")
    add_drafting_flag(fleet)


def is_fleet(arguments: argparse.Namespace) -> bool:
    return arguments.workers is not None or arguments.prefill_workers is not None


def run_fleet(arguments: argparse.Namespace) -> int:
    """1: not as near to a measured run as it must be. Ctrl-C: figures of the requests that have ended."""
    plan, perf = _plan(arguments), _perf(arguments.perf)
    measured = _read_measured(arguments)
    workload = _workload(arguments, plan, perf) if measured is None else workload_of(measured)
    started_s, started_cpu_s = time.monotonic(), time.process_time()
    with FleetProgress(len(workload), sys.stderr) as progress:
        result = simulate_fleet(plan, workload, perf, watch=progress.goes_on)
    wall_s, cpu_s = time.monotonic() - started_s, time.process_time() - started_cpu_s
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / MIB
    for line in summary_lines(result):
        print(line)
    print(f"times: {next(iter(perf.values())).provenance}")
    if plan.drafting.num_drafts:
        print(f"drafts: {plan.drafting}")
    comparisons = [] if measured is None or progress.was_interrupted else compare_runs(measured, result)
    for comparison in comparisons:
        print(comparison)
    verdict = "ok" if all(comparison.is_near for comparison in comparisons) else "failed"
    if progress.was_interrupted:
        verdict = "interrupted"
    print(
        f"simulate: {verdict} workers={plan.num_workers} requests={result.num_requests} refused={result.num_refused} "
        f"wall_s={wall_s:.1f} cpu_s={cpu_s:.1f} peak_mib={peak_mib:.0f}"
    )
    return EXIT_STATUS[verdict]


def summary_lines(result: FleetResult) -> list[str]:
    """Percentiles of what clients saw, and how busy the pools were."""
    lines = [f"{'':<14}{'p50':>10}{'p90':>10}{'p99':>10}"]
    figures: dict[str, NDArray[np.float64]] = {**figures_of(result), "exposed_s": result.exposed_s}
    for name, values in figures.items():
        known = values[~np.isnan(values)]
        if len(known):
            ordered = np.sort(known).tolist()
            p50, p90, p99 = (percentile_of_sorted(ordered, percent) for percent in (50, 90, 99))
            lines.append(f"{name:<14}{p50:>10.4f}{p90:>10.4f}{p99:>10.4f}")
    busy = " ".join(f"{role.value}={share:.3f}" for role, share in result.utilisation.items())
    lines.append(f"busy share until the last arrival: {busy}")
    lines.append(f"{result.num_requests} requests in {result.span_s:.1f} s, {result.output_tokens_per_s:.0f} tokens/s")
    return lines


def _plan(arguments: argparse.Namespace) -> FleetPlan:
    pool = PoolPlan(num_workers=1, kv_tokens=arguments.kv_tokens, chunk_tokens=arguments.chunk_tokens)
    return FleetPlan(
        pools={role: replace(pool, num_workers=count) for role, count in _counts(arguments).items()},
        drafting=requested_drafting(arguments.speculate, seed=arguments.seed or 0),
        seed=arguments.seed or 0,
    )


def _counts(arguments: argparse.Namespace) -> dict[Role, int]:
    num_workers, share = arguments.workers, arguments.prefill_share
    num_prefill, num_decode = arguments.prefill_workers, arguments.decode_workers
    if (num_prefill is None) != (num_decode is None):
        raise ConfigError("--prefill-workers and --decode-workers go together")
    if num_prefill is not None:
        if num_workers is not None or share is not None or arguments.colocated:
            raise ConfigError("give --prefill-workers and --decode-workers, or --workers and how they are shared out")
        return {Role.PREFILL: num_prefill, Role.DECODE: num_decode}
    if arguments.colocated:
        if share is not None:
            raise ConfigError("--colocated workers are all alike; leave --prefill-share out")
        return {Role.BOTH: num_workers}
    num_prefill = max(1, round(num_workers * DEFAULT_PREFILL_SHARE)) if share is None else round(num_workers * share)
    if not 1 <= num_prefill < num_workers:
        raise ConfigError(f"{num_prefill} of {num_workers} workers would prefill; leave at least 1 for each role")
    return {Role.PREFILL: num_prefill, Role.DECODE: num_workers - num_prefill}


def _perf(path: Path | None) -> dict[Role, PerfModel]:
    return dict.fromkeys(Role, ASSUMED if path is None else read_profile(path).model)


def _read_measured(arguments: argparse.Namespace) -> LoadResult | None:
    if arguments.validate is None:
        return None
    if arguments.rate is not None or arguments.requests is not None:
        raise ConfigError("--validate has its own requests; leave --rate and --requests out")
    return read_result(arguments.validate)


def _workload(arguments: argparse.Namespace, plan: FleetPlan, perf: dict[Role, PerfModel]) -> Sequence[WorkloadRequest]:
    rate_per_s: float | None = arguments.rate
    if rate_per_s is not None and not 0 < rate_per_s < float("inf"):
        raise ConfigError("--rate is in requests a second and must be over 0")
    num_requests = DEFAULT_REQUESTS if arguments.requests is None else arguments.requests
    seed = arguments.seed or 0
    if arguments.workload is not None or arguments.trace is not None:
        load = load_named(workload=arguments.workload, trace=arguments.trace, num_requests=num_requests, seed=seed)
        return (load if rate_per_s is None or not load.has_rate else load.at_rate(rate_per_s)).requests
    num_prompt, num_output = DEFAULT_PROMPT_TOKENS, DEFAULT_OUTPUT_TOKENS
    if rate_per_s is None:
        capacity = capacity_per_s(plan, perf, num_prompt_tokens=num_prompt, num_output_tokens=num_output)
        rate_per_s = DEFAULT_LOAD_SHARE * capacity
    keys = f"prompt={num_prompt},output={num_output},rate={rate_per_s!r}"
    return load_named(workload=f"synthetic:{keys}", trace=None, num_requests=num_requests, seed=seed).requests
