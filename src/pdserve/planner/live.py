"""The load of a running gateway, as far as its metrics tell: from readings of them over a while.

Counters tell rates and mean lengths. The spread of the prompts' lengths follows from how the tokens of the answered
requests vary between readings: those of n requests vary n times as much as one. No counter goes up with an answer's
length when it ends, so the spread of the answers' is that of the time they take after their first token.
"""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from prometheus_client.parser import text_string_to_metric_families

from pdserve.errors import ConfigError
from pdserve.workload.arrivals import arrivals_s
from pdserve.workload.request import WorkloadRequest

PENDING = "pdserve:requests_pending"
ANSWERED = "vllm:request_success_total"
FAILED = "pdserve:requests_failed_total"
CANCELLED = "pdserve:requests_cancelled_total"
PROMPT_TOKENS = "vllm:prompt_tokens_total"
GENERATED_TOKENS = "vllm:generation_tokens_total"
TTFT = "vllm:time_to_first_token_seconds"
E2E = "vllm:e2e_request_latency_seconds"
COUNTERS = (ANSWERED, FAILED, CANCELLED, PROMPT_TOKENS, GENERATED_TOKENS)
HISTOGRAMS = (TTFT, E2E)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayReading:
    """At one instant, since the gateway started."""

    instant_s: float
    num_pending: float
    totals: Mapping[str, float]
    """By the names of `COUNTERS`, summed over labels; and `_sum` of `HISTOGRAMS`."""
    buckets: Mapping[str, Mapping[float, float]]
    """By the names of `HISTOGRAMS`: upper bound to the number of all that were not longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenLoad:
    window_s: float
    num_answered: int
    num_failed: int
    """Which are not in `rate_per_s`: a request that is refused for what it says is no load."""
    num_cancelled: int
    rate_per_s: float
    """At which requests came."""
    num_prompt_tokens: float
    """The mean."""
    prompt_cv: float
    """Standard deviation over mean; 0 also where too few requests were answered to tell."""
    num_output_tokens: float
    output_cv: float

    def requests(self, num_requests: int, *, seed: int) -> list[WorkloadRequest]:
        """That come at random at this rate, with log-normal lengths of these means and spreads."""
        source = random.Random(seed)
        return [
            WorkloadRequest(
                arrival_s=arrival_s,
                num_prompt_tokens=_length(source, self.num_prompt_tokens, self.prompt_cv),
                num_output_tokens=_length(source, self.num_output_tokens, self.output_cv),
            )
            for arrival_s in arrivals_s(num_requests=num_requests, rate_per_s=self.rate_per_s, cv=1.0, seed=seed)
        ]


def read_exposition(text: str, *, instant_s: float) -> GatewayReading:
    """From Prometheus's text format. Raises: `ConfigError` when it is none, or not of a pdserve gateway."""
    totals = dict.fromkeys((*COUNTERS, *(f"{name}_sum" for name in HISTOGRAMS)), 0.0)
    buckets: dict[str, dict[float, float]] = {name: {} for name in HISTOGRAMS}
    num_pending: float | None = None
    try:
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        for sample in samples:
            histogram = sample.name.removesuffix("_bucket")
            if sample.name == PENDING:
                num_pending = sample.value
            elif sample.name in totals:
                totals[sample.name] += sample.value
            elif histogram in buckets and histogram != sample.name:
                bound = float(sample.labels["le"])
                buckets[histogram][bound] = buckets[histogram].get(bound, 0.0) + sample.value
    except (ValueError, KeyError) as error:
        raise ConfigError(f"it has no metrics in Prometheus's text format: {error}") from error
    if num_pending is None:
        raise ConfigError(f"its metrics are not those of a pdserve gateway: {PENDING} is missing")
    return GatewayReading(instant_s=instant_s, num_pending=num_pending, totals=totals, buckets=buckets)


def seen_load(readings: Sequence[GatewayReading]) -> SeenLoad:
    """Requires: two readings at least, in order of time.

    Raises: `ConfigError` when no request was answered between the first and the last, or the gateway began anew.
    """
    first, last = readings[0], readings[-1]
    if any(after.totals[name] < before.totals[name] for before, after in pairwise(readings) for name in COUNTERS):
        raise ConfigError("the gateway was started anew meanwhile; read its load again")
    window_s = last.instant_s - first.instant_s
    gained = {name: last.totals[name] - first.totals[name] for name in first.totals}
    num_answered, num_cancelled = gained[ANSWERED], gained[CANCELLED]
    num_come = num_answered + num_cancelled + last.num_pending - first.num_pending
    if num_answered < 1 or num_come < 1:
        raise ConfigError(f"no request was answered in {window_s:.0f} s; read its load while it has one, or for longer")
    return SeenLoad(
        window_s=window_s,
        num_answered=round(num_answered),
        num_failed=round(gained[FAILED]),
        num_cancelled=round(num_cancelled),
        rate_per_s=num_come / window_s,
        num_prompt_tokens=max(1.0, gained[PROMPT_TOKENS] / num_answered),
        prompt_cv=_prompt_cv(readings),
        num_output_tokens=max(1.0, gained[GENERATED_TOKENS] / (num_answered + num_cancelled)),
        output_cv=_output_cv(first, last),
    )


def _prompt_cv(readings: Sequence[GatewayReading]) -> float:
    """The variance of a sum of n lengths is n times that of one."""
    gains = [
        (after.totals[ANSWERED] - before.totals[ANSWERED], after.totals[PROMPT_TOKENS] - before.totals[PROMPT_TOKENS])
        for before, after in pairwise(readings)
    ]
    gains = [(num_answered, num_tokens) for num_answered, num_tokens in gains if num_answered > 0]
    mean = sum(num_tokens for _, num_tokens in gains) / sum(num_answered for num_answered, _ in gains)
    if len(gains) < 2 or mean <= 0:
        return 0.0
    squares = sum((num_tokens - num_answered * mean) ** 2 / num_answered for num_answered, num_tokens in gains)
    return math.sqrt(squares / (len(gains) - 1)) / mean


def _output_cv(first: GatewayReading, last: GatewayReading) -> float:
    """Of the time from first token to last, where neither end says anything of the other."""
    mean_s = sum(
        sign * (last.totals[f"{name}_sum"] - first.totals[f"{name}_sum"]) for name, sign in ((E2E, 1), (TTFT, -1))
    )
    num_answered, variance = _variance(first.buckets[E2E], last.buckets[E2E])
    variance -= _variance(first.buckets[TTFT], last.buckets[TTFT])[1]
    if num_answered < 2 or mean_s <= 0 or variance <= 0:
        return 0.0
    return math.sqrt(variance) / (mean_s / num_answered)


def _variance(before: Mapping[float, float], after: Mapping[float, float]) -> tuple[float, float]:
    """How many there are, and their variance, all taken to lie in the middles of their buckets, less what the buckets'
    widths add to it (Sheppard's correction)."""
    total = mean = squares = low = below = 0.0
    for high in sorted(after):
        not_longer = after[high] - before.get(high, 0.0)
        count, below = not_longer - below, not_longer
        width = 0.0 if math.isinf(high) else high - low
        middle = low + width / 2
        low = high
        total, mean = total + count, mean + count * middle
        squares += count * (middle**2 - width**2 / 12)
    if total == 0:
        return 0.0, 0.0
    return total, max(0.0, squares / total - (mean / total) ** 2)


def _length(source: random.Random, mean: float, cv: float) -> int:
    variance = math.log(1 + cv * cv)
    return max(1, round(mean * math.exp(source.gauss(-variance / 2, math.sqrt(variance)))))
