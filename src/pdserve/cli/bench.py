"""`pdserve bench`: a load of the operator's own against a running server, and comparisons of such runs."""

import argparse
from importlib import import_module

from pdserve.cli.bench_load import add_load_flags, run_load
from pdserve.cli.subparsers import Subparsers

ACTIONS = {"compare": "pdserve.cli.bench_compare"}
"""Each module offers `add_parser(subparsers)` and `run(arguments) -> int`; without an action, a load is sent."""


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser("bench", help="send a load to a running server", allow_abbrev=False)
    add_load_flags(parser)
    actions = parser.add_subparsers(dest="action", metavar="ACTION")
    for module in ACTIONS.values():
        import_module(module).add_parser(actions)


def run(arguments: argparse.Namespace) -> int:
    if arguments.action is None:
        return run_load(arguments)
    return import_module(ACTIONS[arguments.action]).run(arguments)
