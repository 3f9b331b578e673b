"""`pdserve bench-transfer`: page writes between two processes, beside the limit of each path and other engines."""

import argparse
import re
import sys

import msgspec

from pdserve.bench.transfer import (
    DEFAULT_PAGE_BYTES,
    DEFAULT_REGION_BYTES,
    DEFAULT_REPETITIONS,
    DEFAULT_ROUNDS,
    Configuration,
    Report,
    Row,
    Session,
)
from pdserve.bench.transfer_programs import installed_peers, limit_measures
from pdserve.cli.subparsers import Subparsers
from pdserve.errors import ConfigError
from pdserve.units import KIB, MIB

UNIT_BYTES = {"": 1, "K": KIB, "M": MIB}


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser("bench-transfer", help="measure page writes against the limits of this machine")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of a table")
    parser.add_argument(
        "--pages", type=_page_sizes, default=DEFAULT_PAGE_BYTES, metavar="SIZES", help="default: 4K,16K,64K,256K,1M"
    )
    parser.add_argument(
        "--repetitions", type=_count, default=DEFAULT_REPETITIONS, metavar="N", help="default: %(default)s"
    )
    parser.add_argument("--region", type=_num_bytes, default=DEFAULT_REGION_BYTES, metavar="SIZE", help="default: 128M")
    parser.add_argument("--rounds", type=_count, default=DEFAULT_ROUNDS, metavar="N", help="times through the region")


def run(args: argparse.Namespace) -> int:
    # Loads the native fabric, which the other commands can do without.
    from pdserve.bench.transfer_fabric import fabric_contenders

    configuration = Configuration(
        page_bytes=args.pages, region_bytes=args.region, num_rounds=args.rounds, repetitions=args.repetitions
    )
    if max(configuration.page_bytes) > configuration.region_bytes:
        raise ConfigError("--region: smaller than the largest page of --pages")
    peers, skipped = installed_peers()
    session = Session(
        contenders=[*fabric_contenders(), *peers],
        limits=limit_measures(),
        configuration=configuration,
        on_run=_show_progress,
    )
    report = session.measure(skipped=skipped)
    print(msgspec.json.encode(report).decode() if args.json else format_report(report))
    return 0


def format_report(report: Report) -> str:
    """A table for people: a block a page size, then what the figures mean and where they were measured."""
    lines = [f"{'page':>9}  {'provider':<14} {'GB/s':>7}  {'limit':<18} {'GB/s':>7} {'ratio':>6} {'spread':>7}"]
    lines += [_format_row(row) for row in report.rows]
    lines += [f"{'':>9}  {peer.provider:<14} {peer.reason}" for peer in report.skipped]
    configuration, machine = report.configuration, report.machine
    lines += [
        "",
        f"{configuration.region_bytes // MIB} MiB in random pages, {configuration.num_rounds} times; medians of "
        f"{configuration.repetitions} repetitions, limit and contender in turn; spread is that of the ratio",
        f"{machine.cpu}, {machine.num_cpus} CPUs, Linux {machine.kernel}, commit {report.commit or 'unknown'}",
    ]
    return "\n".join(lines)


def _format_row(row: Row) -> str:
    return (
        f"{row.page_bytes // KIB:>5} KiB  {row.provider:<14} {row.gb_per_s:>7.2f}  {row.limit:<18} "
        f"{row.limit_gb_per_s:>7.2f} {row.ratio:>6.2f} {row.spread:>6.0%}"
    )


def _show_progress(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


def _num_bytes(text: str) -> int:
    """The bytes that `4096`, `16K` or `1M` mean."""
    match = re.fullmatch(r"([1-9][0-9]{0,11})([KM]?)", text.strip(), re.IGNORECASE)
    if match is None:
        raise argparse.ArgumentTypeError(f"'{text}' is no size; write 4096, 16K or 1M")
    return int(match[1]) * UNIT_BYTES[match[2].upper()]


def _page_sizes(text: str) -> tuple[int, ...]:
    return tuple(_num_bytes(part) for part in text.split(","))


def _count(text: str) -> int:
    if re.fullmatch(r"[1-9][0-9]{0,3}", text) is None:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number from 1 to 9999")
    return int(text)
