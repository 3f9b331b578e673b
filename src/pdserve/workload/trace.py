"""Public traces of real loads, as their publishers ship them."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum
from typing import assert_never

from pdserve.errors import ConfigError
from pdserve.workload.azure import read_azure
from pdserve.workload.burstgpt import read_burstgpt
from pdserve.workload.mooncake import QUANTUM_MS, read_mooncake
from pdserve.workload.request import WorkloadRequest


class TraceFormat(Enum):
    """The value is what an operator writes."""

    MOONCAKE = "mooncake"
    AZURE = "azure"
    BURSTGPT = "burstgpt"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    requests: tuple[WorkloadRequest, ...]
    """By arrival, the first one at 0."""
    note: str | None
    """What the reader changed, for whoever reads a result."""


def read_trace(trace_format: TraceFormat, lines: Iterable[str], *, seed: int, max_requests: int | None = None) -> Trace:
    """The first requests, or all: some traces have millions of lines, of which no more are read than needed.

    Raises: `ConfigError`, with the number of the line, when what is read is malformed, or there is nothing.
    """
    note: str | None = None
    match trace_format:
        case TraceFormat.MOONCAKE:
            requests = read_mooncake(lines, seed=seed)
            note = (
                f"each arrival at random between its timestamp and the next, at most {QUANTUM_MS / 1e3:g} s later, as "
                f"the trace's timestamps are rounded; seed {seed}"
            )
        case TraceFormat.AZURE:
            requests = read_azure(lines, max_requests=max_requests)
        case TraceFormat.BURSTGPT:
            requests, num_failed = read_burstgpt(lines, max_requests=max_requests)
            if num_failed:
                note = f"{num_failed} requests without a response left out: they failed when the trace was made"
        case _:
            assert_never(trace_format)
    if not requests:
        raise ConfigError(f"the {trace_format.value} trace has no request")
    return Trace(requests=_from_zero(requests)[:max_requests], note=note)


def _from_zero(requests: list[WorkloadRequest]) -> tuple[WorkloadRequest, ...]:
    ordered = sorted(requests, key=lambda request: request.arrival_s)
    start_s = ordered[0].arrival_s
    return tuple(replace(request, arrival_s=request.arrival_s - start_s) for request in ordered)
