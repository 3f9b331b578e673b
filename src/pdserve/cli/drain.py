"""The flag of every command that serves: how long it lets finish what runs when it is told to stop."""

import argparse
import math

from pdserve.config.drain import DEFAULT_DRAIN_TIMEOUT_S


def add_drain_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--drain-timeout",
        type=_parse_seconds,
        default=DEFAULT_DRAIN_TIMEOUT_S,
        metavar="SECONDS",
        help="for what runs to finish when told to stop; 0: none (default: %(default)g)",
    )


def _parse_seconds(text: str) -> float:
    """Raises: `argparse.ArgumentTypeError`."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0.0 <= seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no time of 0 or more seconds")
    return seconds
