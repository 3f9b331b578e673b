"""The busy share of each pool, from what workers count, read twice."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.bench.exposition import metric_total
from pdserve.bench.load.pools import PASS_SECONDS, PoolReading, busy_shares
from pdserve.telemetry.worker_metrics import WorkerMetrics
from pdserve.units import NS_PER_S


def reading(instant_s: float, **pass_s: float) -> PoolReading:
    """Of workers whose names begin with their role, of two ranks each."""
    return PoolReading(
        instant_s=instant_s,
        roles={name: name.rstrip("0123456789") for name in pass_s},
        num_ranks=dict.fromkeys(pass_s, 2),
        pass_s=pass_s,
    )


def test_busy_share_of_a_pool_is_over_all_ranks_of_its_workers() -> None:
    before = reading(100.0, prefill0=5.0, decode0=0.0, decode1=1.0)
    after = reading(110.0, prefill0=15.0, decode0=20.0, decode1=1.0)
    assert busy_shares(before, after) == {"decode": 0.5, "prefill": 0.5}


def test_busy_share_without_workers_that_stayed_is_not_told() -> None:
    before, after = reading(100.0, decode0=5.0), reading(110.0, decode1=9.0)
    assert busy_shares(before, after) == {}
    assert busy_shares(None, after) == {}
    assert busy_shares(before, None) == {}
    assert busy_shares(before, before) == {}


@given(st.floats(0, 1e6), st.floats(0, 1e6))
def test_busy_share_of_any_counts_is_a_share(earlier: float, later: float) -> None:
    shares = busy_shares(reading(0.0, both0=earlier), reading(1.0, both0=later))
    assert 0.0 <= shares["both"] <= 1.0


def test_pass_seconds_of_a_worker_are_summed_over_its_ranks() -> None:
    metrics = WorkerMetrics(model_name="m")
    assert metric_total(metrics.exposition().decode(), PASS_SECONDS) == 0.0
    metrics.passes.observe(0, started_ns=NS_PER_S, ended_ns=3 * NS_PER_S)
    metrics.passes.observe(1, started_ns=0, ended_ns=NS_PER_S // 4)
    metrics.passes.observe(1, started_ns=0, ended_ns=NS_PER_S // 4)
    assert metric_total(metrics.exposition().decode(), PASS_SECONDS) == pytest.approx(2.5)
