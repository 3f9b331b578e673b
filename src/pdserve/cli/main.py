"""Finds the subcommand and turns errors into one line and an exit status."""

import argparse
import sys
from collections.abc import Iterable, Sequence
from importlib import import_module, metadata

from pdserve.errors import ConfigError, PdserveError

COMMANDS = {
    "serve": "pdserve.cli.serve",
    "worker": "pdserve.cli.worker",
    "gateway": "pdserve.cli.gateway",
    "model": "pdserve.cli.model",
    "trace": "pdserve.cli.trace",
    "verify-handoff": "pdserve.cli.verify_handoff",
    "verify-semantics": "pdserve.cli.verify_semantics",
    "verify-faults": "pdserve.cli.verify_faults",
    "soak": "pdserve.cli.soak",
    "simulate": "pdserve.cli.simulate",
    "topology": "pdserve.cli.topology",
    "bench": "pdserve.cli.bench",
    "bench-transfer": "pdserve.cli.bench_transfer",
    "bench-engine": "pdserve.cli.bench_engine",
    "bench-serving": "pdserve.cli.bench_serving",
    "bench-decoding": "pdserve.cli.bench_decoding",
    "profile": "pdserve.cli.profile",
    "plan": "pdserve.cli.plan",
}
"""Each module offers `add_parser(subparsers)` and `run(arguments) -> int`."""

EXIT_CONFIG_ERROR = 2
EXIT_FAILURE = 1
EXIT_INTERRUPTED = 130


def build_parser(commands: Iterable[str] = tuple(COMMANDS)) -> argparse.ArgumentParser:
    """For these commands alone; the modules of the others are not imported."""
    parser = argparse.ArgumentParser(
        prog="pdserve",
        description="Serve LLMs with prefill and decode on separate pools of workers.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"pdserve {metadata.version('pdserve')}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in commands:
        import_module(COMMANDS[command]).add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """0: done; 1: failed; 2: asked for what can't be done; 130: interrupted."""
    words = sys.argv[1:] if argv is None else argv
    # All modules take 1.1 s of a core to import, a worker's or the gateway's own 0.3 s (2-core Xeon VM, 2026-11-30).
    commands = words[:1] if words and words[0] in COMMANDS else COMMANDS
    arguments = build_parser(commands).parse_args(words)
    try:
        return import_module(COMMANDS[arguments.command]).run(arguments)
    except ConfigError as error:
        print(f"pdserve {arguments.command}: {error.message}", file=sys.stderr)
        return EXIT_CONFIG_ERROR
    except PdserveError as error:
        print(f"pdserve {arguments.command}: {type(error).__name__}: {error.message}", file=sys.stderr)
        return EXIT_FAILURE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
