"""`pdserve bench compare`: two runs of the same load against each other."""

import argparse
from pathlib import Path

from pdserve.cli.subparsers import Subparsers


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser("compare", help="compare two runs of the same arrival list", allow_abbrev=False)
    parser.add_argument("a", type=Path, metavar="A.json", help="result.json of the baseline")
    parser.add_argument("b", type=Path, metavar="B.json", help="result.json of what is compared with it")


def run(arguments: argparse.Namespace) -> int:
    from pdserve.bench.report.compare import compare_files

    print(compare_files(arguments.a, arguments.b))
    return 0
