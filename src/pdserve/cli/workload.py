"""The flags that say which load: synthetic or a public trace, how much of it, scaled and stretched."""

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pdserve.errors import ConfigError
from pdserve.workload.request import WorkloadRequest
from pdserve.workload.scaling import with_scaled_lengths, with_stretched_time
from pdserve.workload.synthetic import parse_synthetic
from pdserve.workload.trace import Trace, TraceFormat, read_trace

DEFAULT_NUM_REQUESTS = 100
SYNTHETIC = "synthetic"


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    requests: tuple[WorkloadRequest, ...]
    seed: int
    configuration: Mapping[str, str]
    """What it was made from, for the result."""

    @property
    def has_rate(self) -> bool:
        """Two requests at least come at different instants."""
        return self.requests[-1].arrival_s > self.requests[0].arrival_s

    @property
    def rate_per_s(self) -> float:
        """The mean rate of its arrivals. Requires: `has_rate`."""
        return (len(self.requests) - 1) / (self.requests[-1].arrival_s - self.requests[0].arrival_s)

    def at_rate(self, rate_per_s: float) -> "Load":
        """As many requests, that come faster or slower. Requires: `has_rate`, and `rate_per_s` > 0."""
        return replace(self, requests=tuple(with_stretched_time(self.requests, self.rate_per_s / rate_per_s)))


def load_named(*, workload: str | None, trace: str | None, num_requests: int, seed: int) -> Load:
    """As `--workload` or `--trace` says, neither scaled nor stretched. Raises: `ConfigError`."""
    return requested_load(
        argparse.Namespace(
            workload=workload, trace=trace, requests=num_requests, seed=seed, scale_length=1.0, stretch=1.0
        )
    )


def add_workload_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--workload",
        metavar="synthetic:KEYS",
        help="as in synthetic:prompt=256,output=64,rate=0.5, with cv=, seed= and prefix= where wanted",
    )
    formats = "|".join(each.value for each in TraceFormat)
    parser.add_argument("--trace", metavar="FORMAT:FILE", help=f"a public trace instead: {formats}, and its file")
    parser.add_argument(
        "--requests", type=int, metavar="N", help=f"how many, the first of a trace (default: {DEFAULT_NUM_REQUESTS})"
    )
    parser.add_argument("--seed", type=int, default=0, help="of arrivals, jitter and prompts (default: %(default)s)")
    parser.add_argument(
        "--scale-length", type=float, default=1.0, metavar="FACTOR", help="of prompts, blocks and outputs (default: 1)"
    )
    parser.add_argument(
        "--stretch", type=float, default=1.0, metavar="FACTOR", help="of the time between arrivals (default: 1)"
    )


def requested_load(arguments: argparse.Namespace) -> Load:
    """Raises: `ConfigError`."""
    if (arguments.workload is None) == (arguments.trace is None):
        raise ConfigError("say which load: --workload synthetic:prompt=256,output=64,rate=0.5 or --trace FORMAT:FILE")
    num_requests = DEFAULT_NUM_REQUESTS if arguments.requests is None else arguments.requests
    if num_requests < 1:
        raise ConfigError(f"--requests must be 1 or more, not {num_requests}")
    if arguments.seed < 0:
        raise ConfigError(f"--seed must be 0 or more, not {arguments.seed}")
    for flag, factor in (("--scale-length", arguments.scale_length), ("--stretch", arguments.stretch)):
        if not 0 < factor < math.inf:
            raise ConfigError(f"{flag} must be a factor over 0, not {factor}")
    if arguments.workload is not None:
        named, requests, notes = _synthetic(arguments.workload, num_requests, seed=arguments.seed)
    else:
        named, requests, notes = _of_trace(arguments.trace, num_requests, seed=arguments.seed)
    scaled = with_stretched_time(with_scaled_lengths(requests, arguments.scale_length), arguments.stretch)
    configuration = {
        "load": named,
        "requests": str(len(requests)),
        "seed": str(arguments.seed),
        "length scale": f"{arguments.scale_length:g}",
        "time stretch": f"{arguments.stretch:g}",
        **notes,
    }
    return Load(requests=tuple(scaled), seed=arguments.seed, configuration=configuration)


def _synthetic(text: str, num_requests: int, *, seed: int) -> tuple[str, Sequence[WorkloadRequest], dict[str, str]]:
    kind, _, keys = text.partition(":")
    if kind != SYNTHETIC:
        raise ConfigError(f"--workload {text} is none that we know: it begins with {SYNTHETIC}:")
    return text, parse_synthetic(keys, default_seed=seed).requests(num_requests), {}


def _of_trace(text: str, num_requests: int, *, seed: int) -> tuple[str, Sequence[WorkloadRequest], dict[str, str]]:
    name, colon, path = text.partition(":")
    known = {each.value: each for each in TraceFormat}
    if not colon or name not in known:
        raise ConfigError(f"--trace {text} is no FORMAT:FILE; the formats are {', '.join(known)}")
    trace = _read(known[name], Path(path), num_requests, seed=seed)
    notes = {} if trace.note is None else {"trace": trace.note}
    return text, trace.requests, notes


def _read(trace_format: TraceFormat, path: Path, num_requests: int, *, seed: int) -> Trace:
    try:
        with path.open(encoding="utf-8", newline="") as lines:
            return read_trace(trace_format, lines, seed=seed, max_requests=num_requests)
    except OSError as error:
        raise ConfigError(f"the trace {path} can't be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"the trace {path} can't be read: it is no UTF-8 text") from error
