"""What a run of the load generator found: the contents of `result.json`."""

import msgspec

from pdserve.bench.provenance import Machine
from pdserve.workload.objective import Objective

RESULT_VERSION = 1


class SentRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request as its client saw it. Instants are seconds since the run's start."""

    due_s: float
    sent_s: float
    """The generator's lateness is the difference."""
    num_prompt_tokens: int
    num_output_tokens: int
    """Asked for."""
    token_s: tuple[float, ...] = ()
    """When each token came, or each chunk of text where the server does not tell tokens apart."""
    num_generated: int | None = None
    """Tokens of the answer as the server counted them, where that is not the length of `token_s`."""
    ended_s: float | None = None
    """None: the run was cut short before."""
    finish_reason: str | None = None
    status: int | None = None
    """Of the HTTP response; None where there was none."""
    error: str | None = None


class Distribution(msgspec.Struct, frozen=True, kw_only=True):
    """Nearest-rank percentiles, in seconds."""

    num_samples: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    num_requests: int
    num_completed: int
    num_refused: int
    """429 and 503."""
    num_failed: int
    duration_s: float
    """First request due to last token."""
    ttft: Distribution | None
    tpot: Distribution | None
    itl: Distribution | None
    """Pooled over all requests."""
    worst_gap: Distribution | None
    """Of each request."""
    e2e: Distribution | None
    lateness: Distribution | None
    output_tokens_per_s: float
    requests_per_s: float
    attainment: float | None
    """Share of all requests that met the objective; failures and refusals did not."""
    goodput_per_s: float | None


class Disturbance(msgspec.Struct, frozen=True, kw_only=True):
    """What else the machine did during the run, as shares of it; None where the kernel does not tell."""

    steal_share: float | None
    psi_cpu_share: float | None
    """Of the time in which some task waited for a CPU (`/proc/pressure/cpu`, some)."""
    busy_share: float | None = None
    """Of the CPU time of all cores, by whatever it was."""
    generator_cpu_s: float | None = None
    """Of the load generator itself: near the duration of the run, the generator was the limit."""


class LoadResult(msgspec.Struct, frozen=True, kw_only=True):
    version: int = RESULT_VERSION
    commit: str | None
    machine: Machine
    started: str
    """UTC, ISO 8601."""
    configuration: dict[str, str]
    """Every setting that the run depended on, and notes such as an arrival jitter."""
    objective: Objective
    summary: Summary
    disturbance: Disturbance
    pools: dict[str, float] = {}
    """Busy share of each role's workers, where the server's metrics tell."""
    handoff: dict[str, float] = {}
    """Exposed handoff time and hidden share of KV bytes, where the server's traces tell."""
    requests: tuple[SentRequest, ...]
    """In order of arrival."""
