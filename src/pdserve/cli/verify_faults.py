"""`pdserve verify-faults`: real processes are killed, hung and started again at every moment of a handoff."""

import argparse
import asyncio
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.bench.faults.cases import Case, link_cases, process_cases
from pdserve.bench.faults.disconnects import NAME as DISCONNECTS
from pdserve.bench.faults.fleet import FleetSettings
from pdserve.bench.faults.links import NoLinks
from pdserve.bench.faults.runner import Bench, Load
from pdserve.bench.faults.verdict import Result, is_flawless, last_line
from pdserve.bench.handoff_check import NATURAL_TEXT
from pdserve.cli.progress import say
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

    chosen = _Chosen.of(arguments.case)
    if arguments.list:
        print("\n".join(chosen.names))
        return 0
    if arguments.fleets < 1:
        raise ConfigError(f"--fleets must be 1 or more, not {arguments.fleets}")
    source = resolve_model(arguments.model)
    text_ids = tuple(Tokenizer.load(source.dir).encode(NATURAL_TEXT.read_text()))
    results: list[Result] = []

    def on_result(result: Result) -> None:
        results.append(result)
        _print(result)

    bench = Bench(
        settings=fleet_settings(str(source.dir), source.name),
        load=Load.of(text_ids),
        lease_s=LEASE_S,
        on_result=on_result,
        on_progress=say,
    )
    try:
        asyncio.run(_run_all(bench, chosen, num_fleets=arguments.fleets))
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
    finally:
        print(last_line(results), flush=True)
    return 0 if is_flawless(results) else 1


async def _run_all(bench: Bench, chosen: "_Chosen", *, num_fleets: int) -> None:
    # As Ctrl-C does: without it, network namespaces would be left behind.
    this = asyncio.ensure_future(_run_chosen(bench, chosen, num_fleets=num_fleets))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, this.cancel)
    await this


async def _run_chosen(bench: Bench, chosen: "_Chosen", *, num_fleets: int) -> None:
    if chosen.of_processes:
        await bench.run_cases(chosen.of_processes, num_fleets=num_fleets)
    if chosen.of_links:
        try:
            await bench.run_link_cases(chosen.of_links)
        except NoLinks as reason:
            print(f"skipped: {len(chosen.of_links)} cases that cut links: {reason}", flush=True)
    if chosen.disconnects:
        await bench.run_disconnects()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chosen:
    of_processes: tuple[Case, ...]
    of_links: tuple[Case, ...]
    disconnects: bool

    @classmethod
    def of(cls, names: Sequence[str] | None) -> "_Chosen":
        """All, or those of these names. Raises: `ConfigError`."""
        everything = cls(of_processes=process_cases(), of_links=link_cases(), disconnects=True)
        if names is None:
            return everything
        unknown = set(names) - set(everything.names)
        if unknown:
            raise ConfigError(f"there is no case {min(unknown)}; --list names them all")
        return cls(
            of_processes=tuple(case for case in everything.of_processes if case.name in names),
            of_links=tuple(case for case in everything.of_links if case.name in names),
            disconnects=DISCONNECTS in names,
        )

    @property
    def names(self) -> list[str]:
        cases = (*self.of_processes, *self.of_links)
        return [*(case.name for case in cases), *([DISCONNECTS] if self.disconnects else [])]


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


def _print(result: Result) -> None:
    verdict = ", ".join(sorted({finding.flaw.value for finding in result.findings})) or "ok"
    print(f"{result.name}: {verdict} ({result.elapsed_s:.1f} s)", flush=True)
    for finding in result.findings:
        print(f"    {finding.flaw.value}: {finding.what}", flush=True)
