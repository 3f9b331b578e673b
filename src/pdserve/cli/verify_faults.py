"""`pdserve verify-faults`: real processes are killed, hung and started again at every moment of a handoff."""

import argparse
import asyncio
from collections.abc import Sequence

from pdserve.bench.faults.cases import Case, process_cases
from pdserve.bench.faults.fleet import FleetSettings
from pdserve.bench.faults.runner import Load, run_cases
from pdserve.bench.faults.verdict import Result, last_line
from pdserve.bench.handoff_check import NATURAL_TEXT
from pdserve.cli.serve import say
from pdserve.cli.subparsers import Subparsers
from pdserve.config.deployment import WorkerPlace
from pdserve.config.role import Role
from pdserve.errors import ConfigError
from pdserve.text.tokenizer import Tokenizer

LEASE_S = 3.0
CHUNK_TOKENS = 64
DEFAULT_FLEETS = 2

WORKER_FLAGS = (
    *("--chunk-tokens", str(CHUNK_TOKENS), "--max-running", "16", "--kv-tokens", "4096", "--threads", "1"),
    *("--lease", f"{LEASE_S:g}", "--allow-stop-at", "--log-level", "error"),
)


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "verify-faults", help="kill, hang and restart real processes, and compare the answers", allow_abbrev=False
    )
    parser.add_argument("--model", help="model directory or hub id; default: the default model")
    parser.add_argument("--case", action="append", metavar="NAME", help="only this case; may be given several times")
    parser.add_argument("--list", action="store_true", help="print the names of all cases, and run none")
    parser.add_argument(
        "--fleets", type=int, default=DEFAULT_FLEETS, metavar="N", help="sets of processes at a time (default: 2)"
    )


def run(arguments: argparse.Namespace) -> int:
    from pdserve.model.source import resolve_model

    cases = _chosen(arguments.case)
    if arguments.list:
        print("\n".join(case.name for case in cases))
        return 0
    source = resolve_model(arguments.model)
    text_ids = tuple(Tokenizer.load(source.dir).encode(NATURAL_TEXT.read_text()))
    results: list[Result] = []

    def on_result(result: Result) -> None:
        results.append(result)
        _print(result)

    try:
        asyncio.run(
            run_cases(
                fleet_settings(str(source.dir), source.name),
                cases,
                Load.of(text_ids),
                lease_s=LEASE_S,
                num_fleets=arguments.fleets,
                on_result=on_result,
                on_progress=say,
            )
        )
    finally:
        print(last_line(results), flush=True)
    return 0 if last_line(results).startswith("verify-faults: ok") else 1


def fleet_settings(model_dir: str, model_name: str) -> FleetSettings:
    """Two workers of each role, so that there is one to go on."""
    return FleetSettings(
        model_dir=model_dir,
        model_name=model_name,
        places=tuple(
            WorkerPlace(name=f"{role.value}-{index}", role=role, cpus=())
            for role in (Role.PREFILL, Role.DECODE)
            for index in range(2)
        ),
        worker_arguments=WORKER_FLAGS,
        gateway_arguments=("--log-level", "error"),
    )


def _chosen(names: Sequence[str] | None) -> tuple[Case, ...]:
    """Raises: `ConfigError`."""
    cases = process_cases()
    if names is None:
        return cases
    by_name = {case.name: case for case in cases}
    unknown = [name for name in names if name not in by_name]
    if unknown:
        raise ConfigError(f"there is no case {unknown[0]}; --list names them all")
    return tuple(by_name[name] for name in names)


def _print(result: Result) -> None:
    verdict = ", ".join(sorted({finding.flaw.value for finding in result.findings})) or "ok"
    print(f"{result.name}: {verdict} ({result.elapsed_s:.1f} s)", flush=True)
    for finding in result.findings:
        print(f"    {finding.flaw.value}: {finding.what}", flush=True)
