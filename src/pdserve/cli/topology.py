"""`pdserve topology`: devices, NICs and cores of this machine, what a worker would use, and what looks wrong."""

import argparse
from pathlib import Path

import msgspec

from pdserve.cli.subparsers import Subparsers
from pdserve.fabric.topology.report import render
from pdserve.fabric.topology.survey import survey_this_machine, survey_tree
from pdserve.fabric.topology.values import values_of


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "topology", help="show NICs, devices and cores, and what looks wrong", allow_abbrev=False
    )
    parser.add_argument(
        "--sysfs", type=Path, metavar="DIR", help="another machine's sysfs tree; default: this machine's"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def run(arguments: argparse.Namespace) -> int:
    survey = survey_this_machine() if arguments.sysfs is None else survey_tree(arguments.sysfs)
    if arguments.json:
        print(msgspec.json.format(msgspec.json.encode(values_of(survey)), indent=2).decode())
    else:
        print(render(survey))
    return 0
