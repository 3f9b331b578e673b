"""The metrics of both processes, and that `docs/metrics.md` defines each."""

import re
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from pdserve.telemetry.gateway_metrics import GATEWAY_INTERVALS, GatewayMetrics
from pdserve.telemetry.instants import Instant, RequestInstants
from pdserve.telemetry.intervals import Interval
from pdserve.telemetry.worker_metrics import WORKER_INTERVALS, WorkerMetrics
from pdserve.units import NS_PER_S

DOCUMENT = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()


def names_of(registry: CollectorRegistry) -> set[str]:
    """As Prometheus shows them: a counter ends in `_total`."""
    return {family.name + ("_total" if family.type == "counter" else "") for family in registry.collect()}


@pytest.mark.parametrize(
    ("section", "registry"),
    [
        ("Gateway", GatewayMetrics(model_name="m").registry),
        ("Worker", WorkerMetrics(model_name="m").registry),
    ],
)
def test_metrics_of_a_process_are_exactly_those_documented(section: str, registry: CollectorRegistry) -> None:
    text = DOCUMENT.split(f"## {section}")[1].split("\n## ")[0]
    rows = "\n".join(line for line in text.splitlines() if line.startswith("|"))
    documented = set(re.findall(r"`((?:vllm|pdserve):[a-z0-9_]+)", rows))
    assert documented == names_of(registry)


@pytest.mark.parametrize("interval", GATEWAY_INTERVALS + WORKER_INTERVALS, ids=lambda interval: interval.name)
def test_metrics_interval_is_documented_with_its_two_instants(interval: Interval) -> None:
    assert f"| `{interval.name}` | {interval.start.value} | {interval.stop.value} |" in DOCUMENT


@pytest.mark.parametrize("instant", Instant, ids=lambda instant: instant.value)
def test_metrics_instant_is_documented(instant: Instant) -> None:
    assert f"\n| {instant.value} | " in DOCUMENT


def test_instants_difference_is_none_until_both_are_known() -> None:
    instants = RequestInstants().at(Instant.RECEIVED, NS_PER_S)
    assert instants.seconds_between(Instant.RECEIVED, Instant.FINISHED) is None
    later = instants.at(Instant.FINISHED, 3 * NS_PER_S)
    assert later.seconds_between(Instant.RECEIVED, Instant.FINISHED) == 2.0
    assert instants.seconds_between(Instant.RECEIVED, Instant.FINISHED) is None


def test_gateway_metrics_observe_finished_counts_each_known_interval_once() -> None:
    metrics = GatewayMetrics(model_name="m")
    instants = RequestInstants()
    for second, instant in enumerate((Instant.RECEIVED, Instant.FIRST_TOKEN, Instant.LAST_TOKEN, Instant.FINISHED)):
        instants = instants.at(instant, second * NS_PER_S)
    metrics.observe_finished(
        instants, finish_reason="stop", num_prompt_tokens=7, num_generated_tokens=31, mean_gap_s=0.5
    )

    def value(name: str, **labels: str) -> float | None:
        return metrics.registry.get_sample_value(name, {"model_name": "m", **labels})

    assert value("vllm:time_to_first_token_seconds_sum") == 1.0
    assert value("vllm:e2e_request_latency_seconds_sum") == 3.0
    assert value("vllm:request_time_per_output_token_seconds_sum") == 0.5
    assert value("pdserve:tokenize_seconds_count") == 0
    assert value("vllm:prompt_tokens_total") == 7
    assert value("vllm:request_prompt_tokens_sum") == 7
    assert value("vllm:request_generation_tokens_sum") == 31
    buckets = [value("vllm:request_generation_tokens_bucket", le=bound) for bound in ("30.0", "40.0", "+Inf")]
    assert buckets == [0, 1, 1]
    assert value("vllm:request_success_total", finished_reason="stop") == 1


def test_worker_metrics_totals_follow_the_fabric() -> None:
    metrics = WorkerMetrics(model_name="m")
    for by_nic in ((10, 0), (10, 4), (25, 4)):
        metrics.set_fabric(
            num_bytes_pushed=by_nic, num_writes_failed=0, num_stale_immediates=1, num_in_flight=sum(by_nic)
        )
    assert metrics.registry.get_sample_value("pdserve:bytes_pushed_total", {"nic": "0"}) == 25
    assert metrics.registry.get_sample_value("pdserve:bytes_pushed_total", {"nic": "1"}) == 4
    assert metrics.registry.get_sample_value("pdserve:stale_immediates_total") == 1
    assert metrics.registry.get_sample_value("pdserve:pushes_in_flight") == 29
    assert b'pdserve:bytes_pushed_total{nic="0"} 25.0' in metrics.exposition()
