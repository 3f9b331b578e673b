"""`pdserve soak`: mixed load and random faults on real processes, for minutes on end."""

import argparse
import asyncio
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from pdserve.bench.faults.fleet import FleetSettings
from pdserve.bench.handoff_check import NATURAL_TEXT
from pdserve.bench.semantics.completions import Texts
from pdserve.bench.soak.disturber import DRAIN_TIMEOUT_S
from pdserve.bench.soak.mix import load_mix
from pdserve.bench.soak.result import SoakResult
from pdserve.bench.soak.soak import SoakSettings, soak
from pdserve.cli.main import EXIT_FAILURE, EXIT_INTERRUPTED
from pdserve.cli.out_file import require_folder_of
from pdserve.cli.progress import say
from pdserve.cli.subparsers import Subparsers
from pdserve.cli.until_signal import run_until_signal
from pdserve.config.deployment import DeploymentRequest, place_workers
from pdserve.errors import ConfigError
from pdserve.text.tokenizer import Tokenizer
from pdserve.units import MIB

if TYPE_CHECKING:
    from pdserve.model.source import ModelSource

NUM_EACH_ROLE = 2
LEASE_S = 5.0
"""Short, that a freeze past it does not take long."""

FAULT_GAP_S = (3.0, 15.0)
ROUND_MINUTES = 5.0
NUM_SAMPLES = 180
LEAST_SAMPLE_EVERY_S = 0.5

WORKER_FLAGS = (
    *("--chunk-tokens", "128", "--max-running", "16", "--kv-tokens", "4096", "--threads", "1"),
    *("--lease", str(LEASE_S), "--drain-timeout", str(DRAIN_TIMEOUT_S)),
)
"""One thread: how a product is split over threads decides its last bit. A small KV cache: it is full now and then."""


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "soak", help="run mixed load and faults for long, and see that nothing grows", allow_abbrev=False
    )
    parser.add_argument("--minutes", type=float, default=30.0, help="of load and faults (default: 30)")
    parser.add_argument("--seed", type=int, default=1, help="of the faults and of each client (default: 1)")
    parser.add_argument("--clients", type=int, default=6, metavar="N", help="requests at once (default: 6)")
    parser.add_argument(
        "--model",
        help="directory or hub id, or tiny-deepseek or tiny-qwen3-moe, made on the fly; default: the default model",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all that was seen there too")


def run(arguments: argparse.Namespace) -> int:
    """1: not passed; 130: interrupted, and what was seen until then is reported."""
    if arguments.minutes <= 0 or arguments.clients < 1:
        raise ConfigError("--minutes must be above 0, and --clients at least 1")
    if arguments.json is not None:
        require_folder_of("--json", arguments.json)
    settings = _settings(arguments, _resolve(arguments.model))
    results: list[SoakResult] = []

    async def service(stop: asyncio.Event) -> None:
        results.append(await soak(settings, stop, say=say))

    run_until_signal(service)
    (result,) = results
    _report(result)
    if arguments.json is not None:
        arguments.json.write_bytes(msgspec.json.encode(result) + b"\n")
    if result.was_interrupted:
        return EXIT_INTERRUPTED
    return EXIT_FAILURE if result.findings else 0


def _resolve(model: str | None) -> "ModelSource":
    from pdserve.bench.tiny_models import TINY_NAMES, prepare_tiny
    from pdserve.model.source import ModelSource, resolve_model

    if model in TINY_NAMES:
        return ModelSource(dir=prepare_tiny(model), name=model)
    return resolve_model(model)


def _settings(arguments: argparse.Namespace, source: "ModelSource") -> SoakSettings:
    request = DeploymentRequest(
        num_prefill=NUM_EACH_ROLE,
        num_decode=NUM_EACH_ROLE,
        num_colocated=0,
        available_cpus=tuple(sorted(os.sched_getaffinity(0))),
    )
    duration_s = 60 * arguments.minutes
    return SoakSettings(
        fleet=FleetSettings(
            model_dir=str(source.dir),
            model_name=source.name,
            places=place_workers(request),
            worker_arguments=WORKER_FLAGS,
        ),
        mix=load_mix(Texts.of(NATURAL_TEXT.read_text(), Tokenizer.load(source.dir))),
        duration_s=duration_s,
        num_rounds=max(2, round(arguments.minutes / ROUND_MINUTES)),
        num_clients=arguments.clients,
        seed=arguments.seed,
        lease_s=LEASE_S,
        fault_gap_s=FAULT_GAP_S,
        sample_every_s=max(LEAST_SAMPLE_EVERY_S, duration_s / NUM_SAMPLES),
    )


def _report(result: SoakResult) -> None:
    for row in result.kinds:
        endings = " ".join(f"{ending}={number}" for ending, number in sorted(row.endings.items()))
        print(f"{row.kind}: {endings or 'none sent'}")
    print("errors: " + (" ".join(f"{code}={number}" for code, number in sorted(result.codes.items())) or "none"))
    print("faults: " + (" ".join(f"{kind}={number}" for kind, number in sorted(result.faults.items())) or "none"))
    for growth in result.growths:
        print(
            f"{growth.name} pid={growth.pid}: rss_mib={growth.before_bytes / MIB:.1f}, "
            f"then {growth.after_bytes / MIB:.1f} ({growth.share:+.2%})"
        )
    for each in result.idle_growths:
        print(
            f"{each.name} pid={each.pid} when idle: fds={each.num_fds:+d} threads={each.num_threads:+d} "
            f"shared_bytes={each.shared_bytes:+d}"
        )
    for line in [*result.problems, *(f"not passed: {finding}" for finding in result.findings)]:
        print(line)
    verdict = "interrupted" if result.was_interrupted else "FAILED" if result.findings else "ok"
    rss_growth = "none" if result.rss_growth is None else f"{result.rss_growth:.1%}"
    print(
        f"soak: {verdict} minutes={result.duration_s / 60:.1f} requests={result.num_requests} "
        f"faults={result.num_faults} wrong={result.num_wrong} hung={result.num_hung} leaked={len(result.leaks)} "
        f"rss_growth={rss_growth} fds_growth={result.fds_growth}"
    )
    sys.stdout.flush()
