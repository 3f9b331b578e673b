"""The flags of `pdserve plan` that say which load, and the load: all alike, of a trace, or what a gateway has."""

import argparse
import math
from dataclasses import replace
from typing import TYPE_CHECKING

from pdserve.cli.workload import SYNTHETIC, load_named
from pdserve.errors import ConfigError
from pdserve.workload.synthetic import parse_synthetic
from pdserve.workload.trace import TraceFormat

if TYPE_CHECKING:
    from pdserve.planner.load import PlannedLoad

DEFAULT_WINDOW_S = 60.0
MIN_REQUESTS = 50
"""Fewer do not tell nine of ten from eight of ten."""
SEED = 0


def add_load_flags(parser: argparse.ArgumentParser) -> None:
    load = parser.add_mutually_exclusive_group(required=True)
    load.add_argument(
        "--workload",
        metavar="SPEC",
        help="prompt=TOKENS,output=TOKENS, and cv= and prefix= if wanted; or synthetic: and these with rate=",
    )
    formats = "|".join(each.value for each in TraceFormat)
    load.add_argument("--trace", metavar="FORMAT:FILE", help=f"a public trace: {formats}, and its file")
    load.add_argument(
        "--from", dest="gateway_url", metavar="URL", help="the load that this gateway has (PDSERVE_API_KEY is its key)"
    )
    parser.add_argument(
        "--window", type=float, metavar="SECONDS", help=f"to read the gateway for (default: {DEFAULT_WINDOW_S:g})"
    )
    parser.add_argument(
        "--rate", type=float, metavar="R", help="requests a second; of a trace, faster or slower than it was"
    )
    parser.add_argument(
        "--requests",
        type=int,
        default=300,
        metavar="N",
        help="to simulate on each fleet, the first of a trace (default: %(default)s)",
    )


def check_load_flags(arguments: argparse.Namespace) -> None:
    """All that is wrong with them before anything is read. Raises: `ConfigError`."""
    rate, window = arguments.rate, arguments.window
    _require(rate is None or 0 < rate < math.inf, f"--rate must be over 0, not {rate}")
    _require(arguments.requests >= MIN_REQUESTS, f"--requests must be {MIN_REQUESTS} or more, not {arguments.requests}")
    if arguments.gateway_url is None:
        _require(window is None, "--window goes with --from")
        return
    _require(rate is None, "--from reads the rate of the gateway's requests; leave --rate out")
    _require(window is None or 1 <= window < math.inf, f"--window must be seconds, 1 or more, not {window}")
    is_url = arguments.gateway_url.startswith(("http://", "https://"))
    _require(is_url, f"--from {arguments.gateway_url} is no URL: it begins with http:// or https://")


def planned_load(arguments: argparse.Namespace) -> "PlannedLoad":
    """Requires: `check_load_flags`. Raises: `ConfigError`; `KeyboardInterrupt`."""
    if arguments.gateway_url is not None:
        return _live(arguments)
    return _recorded(arguments) if arguments.workload is None else _uniform(arguments)


def _uniform(arguments: argparse.Namespace) -> "PlannedLoad":
    from pdserve.planner.load import PlannedLoad

    keys, rate_per_s = arguments.workload.removeprefix(f"{SYNTHETIC}:"), arguments.rate
    if keys == arguments.workload:
        _require(rate_per_s is not None, "--workload of lengths alone needs --rate, in requests a second")
        keys = f"{keys},rate={rate_per_s}"
    synthetic = parse_synthetic(keys, default_seed=SEED)
    if rate_per_s is not None:
        synthetic = replace(synthetic, rate_per_s=rate_per_s)
    return PlannedLoad.of(
        synthetic.requests(arguments.requests),
        rate_per_s=synthetic.rate_per_s,
        num_prefix_tokens=synthetic.num_prefix_tokens,
    )


def _recorded(arguments: argparse.Namespace) -> "PlannedLoad":
    from pdserve.planner.load import PlannedLoad

    load = load_named(workload=None, trace=arguments.trace, num_requests=arguments.requests, seed=SEED)
    num_requests = len(load.requests)
    _require(
        num_requests >= MIN_REQUESTS, f"{arguments.trace} has {num_requests} requests; a plan needs {MIN_REQUESTS}"
    )
    _require(load.has_rate, f"{arguments.trace}: its requests come all at once, which is no rate to plan for")
    rate_per_s = load.rate_per_s if arguments.rate is None else arguments.rate
    return PlannedLoad.of(load.at_rate(rate_per_s).requests, rate_per_s=rate_per_s)


def _live(arguments: argparse.Namespace) -> "PlannedLoad":
    from pdserve.cli.plan_live import read_live_load
    from pdserve.planner.load import PlannedLoad

    window_s = DEFAULT_WINDOW_S if arguments.window is None else arguments.window
    seen = read_live_load(arguments.gateway_url.rstrip("/"), window_s=window_s)
    return PlannedLoad.of(seen.requests(arguments.requests, seed=SEED), rate_per_s=seen.rate_per_s)


def _require(is_met: bool, message: str) -> None:
    if not is_met:
        raise ConfigError(message)
