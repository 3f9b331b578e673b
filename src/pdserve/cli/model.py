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


def chosen_model(arguments: argparse.Namespace) -> tuple[str, str]:
    """Directory and name of the model to serve: as `pdserve serve` resolved it for its children, or resolved here.

    Raises: `ConfigError` when it can't be had.
    """
    if arguments.model_dir is not None:
        return arguments.model_dir, arguments.model_name
    from pdserve.model.source import resolve_model

    source = resolve_model(arguments.model)
    return str(source.dir), source.name
