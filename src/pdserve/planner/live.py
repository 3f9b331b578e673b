"""The load of a running gateway, as far as its metrics tell: from readings of them over a while.

Counters tell rates and mean lengths, histograms how the lengths of the answered requests are spread.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from prometheus_client.parser import text_string_to_metric_families

from pdserve.errors import ConfigError
from pdserve.planner.lengths import SeenLengths, buckets_between
from pdserve.workload.arrivals import arrivals_s
from pdserve.workload.request import WorkloadRequest

PENDING = "pdserve:requests_pending"
ANSWERED = "vllm:request_success_total"
FAILED = "pdserve:requests_failed_total"
CANCELLED = "pdserve:requests_cancelled_total"
PROMPT_TOKENS = "vllm:prompt_tokens_total"
GENERATED_TOKENS = "vllm:generation_tokens_total"
PROMPT_LENGTHS = "vllm:request_prompt_tokens"
ANSWER_LENGTHS = "vllm:request_generation_tokens"
COUNTERS = (ANSWERED, FAILED, CANCELLED, PROMPT_TOKENS, GENERATED_TOKENS)
HISTOGRAMS = (PROMPT_LENGTHS, ANSWER_LENGTHS)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayReading:
    """At one instant, since the gateway started."""

    instant_s: float
    num_pending: float
    totals: Mapping[str, float]
    """By the names of `COUNTERS`, summed over labels."""
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
    prompts: SeenLengths
    answers: SeenLengths

    def requests(self, num_requests: int, *, seed: int) -> list[WorkloadRequest]:
        """That come at random at this rate, with lengths as were seen."""
        source = random.Random(seed)
        come_s = arrivals_s(num_requests=num_requests, rate_per_s=self.rate_per_s, cv=1.0, seed=seed)
        prompts, answers = self.prompts.draw(source, num_requests), self.answers.draw(source, num_requests)
        return [
            WorkloadRequest(
                arrival_s=arrival_s, num_prompt_tokens=num_prompt_tokens, num_output_tokens=num_answer_tokens
            )
            for arrival_s, num_prompt_tokens, num_answer_tokens in zip(come_s, prompts, answers, strict=True)
        ]


def read_exposition(text: str, *, instant_s: float) -> GatewayReading:
    """From Prometheus's text format. Raises: `ConfigError` when it is none, or not of a pdserve gateway with these."""
    totals: dict[str, float] = dict.fromkeys(COUNTERS, 0.0)
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
                if not bound >= 1:
                    raise ValueError(f"{histogram} has a bucket of up to {bound} tokens")
                buckets[histogram][bound] = buckets[histogram].get(bound, 0.0) + sample.value
    except (ValueError, KeyError) as error:
        raise ConfigError(f"it has no metrics in Prometheus's text format: {error}") from error
    if num_pending is None:
        raise ConfigError(f"its metrics are not those of a pdserve gateway: {PENDING} is missing")
    for name in HISTOGRAMS:
        if not buckets[name]:
            raise ConfigError(
                f"its metrics lack {name}, which tells how long requests are: update that gateway, or say how long "
                "they are with --workload and --rate"
            )
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
    prompts, answers = (buckets_between(first.buckets[name], last.buckets[name]) for name in HISTOGRAMS)
    if num_answered < 1 or num_come < 1 or not prompts or not answers:
        raise ConfigError(f"no request was answered in {window_s:.0f} s; read its load while it has one, or for longer")
    return SeenLoad(
        window_s=window_s,
        num_answered=round(num_answered),
        num_failed=round(gained[FAILED]),
        num_cancelled=round(num_cancelled),
        rate_per_s=num_come / window_s,
        prompts=SeenLengths(mean=max(1.0, gained[PROMPT_TOKENS] / num_answered), buckets=prompts),
        answers=SeenLengths(mean=max(1.0, gained[GENERATED_TOKENS] / (num_answered + num_cancelled)), buckets=answers),
    )
