"""Histograms that are each defined by two instants."""

from collections.abc import Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Histogram

from pdserve.telemetry.instants import Instant, RequestInstants

LATENCY_BUCKETS_S = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 0.75),
    *(1.0, 1.5, 2.5, 5.0, 10.0, 25.0, 60.0, 150.0, 600.0),
)
"""From a pass of a tiny model to the longest request; the SLOs in use (0.05, 0.1, 0.25, 0.4 s) lie near bounds."""


@dataclass(frozen=True, slots=True)
class Interval:
    """`name` is the time from `start` to `stop`."""

    name: str
    start: Instant
    stop: Instant
    documentation: str


class IntervalHistograms:
    """One histogram for each interval, all labelled with the model's name."""

    def __init__(self, registry: CollectorRegistry, intervals: Sequence[Interval], *, model_name: str) -> None:
        self._histograms = tuple(
            (interval, latency_histogram(registry, interval.name, interval.documentation, model_name=model_name))
            for interval in intervals
        )

    def observe(self, instants: RequestInstants) -> None:
        """Count every interval both of whose instants are known."""
        for interval, histogram in self._histograms:
            duration_s = instants.seconds_between(interval.start, interval.stop)
            if duration_s is not None:
                histogram.observe(duration_s)


def latency_histogram(registry: CollectorRegistry, name: str, documentation: str, *, model_name: str) -> Histogram:
    return Histogram(
        name, documentation, labelnames=("model_name",), registry=registry, buckets=LATENCY_BUCKETS_S
    ).labels(model_name=model_name)
