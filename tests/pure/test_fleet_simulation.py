"""The simulator at fleet scale: what goes in comes out once, and queues are as long as they must be."""

from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.pure.fleet_loads import SWIFT, apart, poisson, pool, run, together

from pdserve.config.role import Role
from pdserve.errors import ConfigError
from pdserve.perfmodel.fitted import affine_model
from pdserve.simulate.fleet.capacity import capacity_per_s
from pdserve.simulate.fleet.plan import FleetPlan
from pdserve.simulate.fleet.result import FleetResult
from pdserve.simulate.fleet.simulation import simulate_fleet
from pdserve.workload.request import WorkloadRequest

requests = st.lists(
    st.builds(
        WorkloadRequest,
        arrival_s=st.floats(0, 2),
        num_prompt_tokens=st.integers(1, 3000),
        num_output_tokens=st.integers(1, 40),
    ),
    max_size=25,
).map(lambda load: sorted(load, key=lambda request: request.arrival_s))
fleets = st.sampled_from([apart(1, 1), apart(2, 3, num_ranks=2), together(2, chunk_tokens=100), together(1)])


@settings(max_examples=30)
@given(plan=fleets, load=requests)
def test_fleet_ends_each_request_once_and_answers_it_whole(plan: FleetPlan, load: list[WorkloadRequest]) -> None:
    result = run(plan, load)
    assert result.num_requests == len(load)
    assert result.num_refused == 0
    assert result.num_output_tokens.tolist() == [request.num_output_tokens for request in load]
    assert not np.isnan(result.ttft_s).any()
    assert (result.e2e_s >= result.ttft_s).all()
    assert (result.ttft_s > 0).all()


def test_fleet_that_can_hold_no_such_prompt_refuses_it_and_answers_the_others() -> None:
    load = poisson(10, 10.0)
    load[4] = replace(load[4], num_prompt_tokens=20_000)
    result = run(apart(1, 1), load)
    assert result.status.tolist() == [0] * 4 + [400] + [0] * 5
    assert result.num_refused == 1
    assert np.isnan(result.ttft_s[4])
    assert result.attainment(ttft_s=9.0, tpot_s=9.0) == 0.9


def arrays_of(result: FleetResult) -> list[list[float]]:
    columns = (result.ttft_s, result.tpot_s, result.worst_gap_s, result.e2e_s, result.exposed_s)
    return [np.nan_to_num(column, nan=-1.0).tolist() for column in columns]


def test_fleet_with_the_same_load_does_the_same() -> None:
    plan, load = apart(2, 3), poisson(60, 60.0)
    assert arrays_of(run(plan, load)) == arrays_of(run(plan, load))
    assert arrays_of(run(plan, load)) != arrays_of(run(plan, poisson(60, 60.0, seed=1)))


def slow_ttft_s(load: list[WorkloadRequest], *, service_s: float) -> list[float]:
    """One server, first come first served, one at a time."""
    ttft_s: list[float] = []
    free_s = 0.0
    for request in load:
        free_s = max(free_s, request.arrival_s) + service_s
        ttft_s.append(free_s - request.arrival_s)
    return ttft_s


def test_fleet_of_one_worker_that_takes_one_prompt_at_a_time_is_a_queue_with_fixed_service() -> None:
    """M/D/1 at a load of 0.7: the mean wait is rho / (2 (1 - rho)) services."""
    service_s = 0.05
    perf = affine_model(provenance="a test", pass_s=service_s, token_s=0.0)
    plan = FleetPlan(pools={Role.BOTH: replace(pool(1), saturation_tokens=1)}, message_ns=0)
    load = poisson(2000, 0.7 / service_s, num_output_tokens=1)
    ttft_s = run(plan, load, perf).ttft_s
    assert ttft_s == pytest.approx(slow_ttft_s(load, service_s=service_s), abs=1e-6)
    assert ttft_s.mean() == pytest.approx(service_s * (1 + 0.7 / (2 * 0.3)), rel=0.15)


def test_fleet_repeats_how_passes_deviated_in_the_order_that_they_did() -> None:
    perf = msgspec.structs.replace(affine_model(provenance="a test", pass_s=0.01, token_s=0.0), deviations=(1, 2, 4))
    plan = FleetPlan(pools={Role.BOTH: pool(1)}, message_ns=0)
    load = [WorkloadRequest(arrival_s=each, num_prompt_tokens=9, num_output_tokens=1) for each in range(12)]
    begins = {tuple(run(replace(plan, seed=seed), load, perf).ttft_s.round(9).tolist()) for seed in range(20)}
    assert begins == {tuple(([0.01, 0.02, 0.04] * 5)[start : start + 12]) for start in range(3)}


def test_fleet_apart_has_no_stalls_where_a_colocated_one_has() -> None:
    """Prompts of 2,000 tokens take 205 ms; a step that one joins is a gap as long."""
    load = poisson(80, 4.0, num_prompt_tokens=2000, num_output_tokens=60)
    colocated, chunked, separate = (
        run(together(2), load),
        run(together(2, chunk_tokens=256), load),
        run(apart(1, 1), load),
    )
    gaps_s = [float(np.median(result.worst_gap_s)) for result in (separate, chunked, colocated)]
    assert gaps_s[0] < 0.02 < gaps_s[1] < gaps_s[2]
    assert gaps_s[2] > 0.2
    assert np.median(separate.tpot_s) < np.median(colocated.tpot_s)


def test_fleet_apart_hides_a_handoff_behind_its_prefill_until_the_link_is_the_slower() -> None:
    load = poisson(40, 2.0, num_prompt_tokens=1000)
    slow_link = affine_model(provenance="a test", pass_s=5e-3, token_s=1e-4, push_s=1e-5, push_byte_s=1e-8)
    quick, slow = run(apart(1, 2), load), run(apart(1, 2), load, slow_link)
    layer_s = 63 * 16 * 2 * 3 * 64 * 4 * 1e-10
    assert np.median(quick.exposed_s) < 2 * layer_s
    assert np.median(slow.exposed_s) > 0.3
    assert np.median(slow.ttft_s) > np.median(quick.ttft_s) + 0.3


def test_fleet_that_is_near_its_capacity_is_busy_and_beyond_it_queues() -> None:
    plan = apart(1, 4)
    capacity = capacity_per_s(plan, dict.fromkeys(Role, SWIFT), num_prompt_tokens=200, num_output_tokens=20)
    assert capacity == pytest.approx(1 / 0.025)
    calm, crowded = run(plan, poisson(300, 0.5 * capacity)), run(plan, poisson(300, 1.5 * capacity))
    assert calm.utilisation[Role.PREFILL] == pytest.approx(0.5, abs=0.06)
    assert crowded.utilisation[Role.PREFILL] > 0.95
    assert np.median(crowded.ttft_s) > 5 * np.median(calm.ttft_s)


def test_fleet_balances_over_its_workers() -> None:
    """Twice the workers and twice the load: no worse for anybody."""
    small = run(apart(1, 2), poisson(200, 20.0))
    large = run(apart(4, 8), poisson(800, 80.0))
    assert np.median(large.ttft_s) <= np.median(small.ttft_s) + 1e-3
    assert large.utilisation[Role.PREFILL] == pytest.approx(small.utilisation[Role.PREFILL], abs=0.05)


def test_fleet_with_full_kv_caches_preempts_and_still_answers_all() -> None:
    plan = FleetPlan(pools={Role.BOTH: pool(1, kv_tokens=1024)})
    load = [WorkloadRequest(arrival_s=0.0, num_prompt_tokens=100, num_output_tokens=200) for _ in range(8)]
    result = run(plan, load)
    assert result.num_refused == 0
    assert result.num_output_tokens.tolist() == [200] * 8


def test_plan_that_can_not_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="nobody decodes"):
        FleetPlan(pools={Role.PREFILL: pool(1)})
    with pytest.raises(ConfigError, match="1 data parallel rank"):
        FleetPlan(pools={Role.PREFILL: pool(1, num_ranks=2), Role.DECODE: pool(1)})
    with pytest.raises(ConfigError, match="num_workers is 0"):
        pool(0)
    with pytest.raises(ConfigError, match="no performance model for the prefill workers"):
        simulate_fleet(apart(1, 1), [], {Role.DECODE: SWIFT})
