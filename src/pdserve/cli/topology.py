"""`pdserve topology`: devices, NICs and cores of this machine, what a worker would use, and what looks wrong."""

import argparse
import os
from pathlib import Path

import msgspec

from pdserve.cli.subparsers import Subparsers
from pdserve.fabric.topology.addresses import AddressOf, live_address
from pdserve.fabric.topology.findings import find
from pdserve.fabric.topology.machine import Machine
from pdserve.fabric.topology.nvml import list_gpus
from pdserve.fabric.topology.plan import Plan, choose
from pdserve.fabric.topology.reading import LIVE_SYSFS, read_machine
from pdserve.fabric.topology.report import Survey, render, structured


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "topology", help="show NICs, devices and cores, and what looks wrong", allow_abbrev=False
    )
    parser.add_argument(
        "--sysfs", type=Path, metavar="DIR", help="another machine's sysfs tree; default: this machine's"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def run(arguments: argparse.Namespace) -> int:
    survey = _recorded(arguments.sysfs) if arguments.sysfs is not None else _live()
    if arguments.json:
        print(msgspec.json.format(msgspec.json.encode(structured(survey)), indent=2).decode())
    else:
        print(render(survey))
    return 0


def _live() -> Survey:
    machine = read_machine(LIVE_SYSFS, listed_gpus=list_gpus())
    plan = choose(machine, allowed_cpus=os.sched_getaffinity(0))
    return _survey("this machine", machine, plan, live_address)


def _recorded(sysfs: Path) -> Survey:
    machine = read_machine(sysfs)
    return _survey(str(sysfs), machine, choose(machine), None)


def _survey(source: str, machine: Machine, plan: Plan, address_of: AddressOf | None) -> Survey:
    findings = find(machine, plan, address_of)
    return Survey(source=source, machine=machine, plan=plan, findings=findings, address_of=address_of)
