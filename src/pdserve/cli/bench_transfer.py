"""`pdserve bench-transfer`: page writes beside the limit of each path and other engines, and how they are planned."""

import argparse
import re
import sys

import msgspec

from pdserve.bench.transfer import Configuration
from pdserve.cli.subparsers import Subparsers
from pdserve.errors import ConfigError
from pdserve.units import KIB, MIB

UNIT_BYTES = {"": 1, "K": KIB, "M": MIB}
DEFAULTS = Configuration()


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser("bench-transfer", help="measure page writes against the limits of this machine")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of a table")
    parser.add_argument(
        "--pages", type=_page_sizes, default=DEFAULTS.page_bytes, metavar="SIZES", help="default: 4K,16K,64K,256K,1M"
    )
    parser.add_argument(
        "--repetitions", type=_count, default=DEFAULTS.repetitions, metavar="N", help="default: %(default)s"
    )
    parser.add_argument(
        "--region", type=_num_bytes, default=DEFAULTS.region_bytes, metavar="SIZE", help="default: 128M"
    )
    parser.add_argument(
        "--rounds", type=_count, default=DEFAULTS.num_rounds, metavar="N", help="times through the region"
    )


def run(args: argparse.Namespace) -> int:
    # Loads the native fabric, which the other commands can do without.
    from pdserve.bench.transfer_report import measure_report
    from pdserve.cli.transfer_table import format_report

    configuration = Configuration(
        page_bytes=args.pages, region_bytes=args.region, num_rounds=args.rounds, repetitions=args.repetitions
    )
    if max(configuration.page_bytes) > configuration.region_bytes:
        raise ConfigError("--region: smaller than the largest page of --pages")
    report = measure_report(configuration, on_run=_show_progress)
    print(msgspec.json.encode(report).decode() if args.json else format_report(report))
    return 0


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
