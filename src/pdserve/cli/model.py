"""`pdserve model prepare`: the default model as a directory that the engine reads."""

import argparse

from pdserve.cli.subparsers import Subparsers


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser("model", help="prepare models", allow_abbrev=False)
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    actions.add_parser(
        "prepare", help="convert the default model into the cache, unless it is there", allow_abbrev=False
    )


def run(arguments: argparse.Namespace) -> int:
    from pdserve.model.source import resolve_model

    source = resolve_model(None)
    print(f"{source.name} is in {source.dir}")
    return 0
