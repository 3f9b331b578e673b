"""What the planner expects of a pool before it simulates any."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.pure.planned_loads import planned

from pdserve.config.role import Role
from pdserve.errors import ConfigError
from pdserve.perfmodel.fitted import affine_model
from pdserve.perfmodel.hardware import hardware
from pdserve.perfmodel.model_shape import model_shape
from pdserve.perfmodel.placement import Placement
from pdserve.planner.estimate import Estimator
from pdserve.planner.goal import Goal
from pdserve.planner.options import chunk_sizes, families


def goal_of(
    *,
    model: str = "llama-3.1-8b",
    prompt: int = 1000,
    output: int = 100,
    rate: float = 10.0,
    ttft_s: float = 1.0,
    tpot_s: float = 0.05,
    prefix: int = 0,
    max_accelerators: int = 1024,
) -> Goal:
    return Goal(
        hardware=hardware("h200"),
        shape=model_shape(model),
        workload=planned(f"prompt={prompt},output={output},rate={rate},prefix={prefix}"),
        ttft_s=ttft_s,
        tpot_s=tpot_s,
        max_accelerators=max_accelerators,
    )


def estimator_of(goal: Goal, *, pass_s: float, token_s: float) -> Estimator:
    placement = Placement(hardware=goal.hardware, shape=goal.shape, tensor_parallel_size=1)
    return Estimator(
        goal=goal, placement=placement, model=affine_model(provenance="a test", pass_s=pass_s, token_s=token_s)
    )


def test_prefill_of_a_prompt_is_the_sum_of_its_chunks() -> None:
    estimator = estimator_of(goal_of(prompt=1000), pass_s=0.01, token_s=0.001)

    assert estimator.prefill_s(8192) == pytest.approx(1.01)
    assert estimator.prefill_s(300) == pytest.approx(1.04)


def test_prefill_leaves_out_the_prefix_that_is_cached() -> None:
    estimator = estimator_of(goal_of(prompt=1000, prefix=600), pass_s=0.01, token_s=0.001)

    assert estimator.prefill_s(8192) == pytest.approx(0.41)


def test_prefill_wait_of_one_worker_is_that_of_pollaczek_and_khinchine() -> None:
    """For one server the approximation is exact; the tail of nine in ten is that of an exponential."""
    estimator = estimator_of(goal_of(prompt=1000), pass_s=0.0, token_s=0.001)
    load = 0.5
    mean_wait_s = 1.0 / 2 * load / (1 - load)

    ttft_s = estimator.prefill_ttft_s(load, num_workers=1, chunk_tokens=8192)

    assert ttft_s == pytest.approx(mean_wait_s / load * math.log(10 * load) + estimator.idle_ttft_s(8192))


@given(rate=st.floats(0.01, 4.9), num_workers=st.integers(5, 30))
def test_prefill_of_more_workers_is_never_later(rate: float, num_workers: int) -> None:
    estimator = estimator_of(goal_of(prompt=1000), pass_s=0.0, token_s=0.001)

    fewer = estimator.prefill_ttft_s(rate, num_workers=num_workers, chunk_tokens=8192)
    more = estimator.prefill_ttft_s(rate, num_workers=num_workers + 1, chunk_tokens=8192)

    assert more <= fewer * (1 + 1e-9)


def test_prefill_over_its_capacity_is_infinitely_late() -> None:
    estimator = estimator_of(goal_of(prompt=1000), pass_s=0.0, token_s=0.001)

    assert estimator.prefill_ttft_s(2.0, num_workers=2, chunk_tokens=8192) == math.inf


def test_decode_rate_keeps_the_batch_at_the_rate_within_the_target() -> None:
    goal = goal_of(tpot_s=0.05, output=100)
    estimator = estimator_of(goal, pass_s=0.01, token_s=0.001)
    rate = estimator.decode_rate()
    mean_batch = rate * goal.workload.num_output_tokens * estimator.step_s(29)

    assert 0 < mean_batch < 40
    assert estimator.step_s(round(mean_batch + 1.3 * math.sqrt(mean_batch))) <= goal.tpot_s * 1.05


def test_decode_rate_is_nothing_when_one_token_takes_too_long() -> None:
    assert estimator_of(goal_of(tpot_s=0.01), pass_s=0.02, token_s=0.001).decode_rate() == 0.0


@settings(max_examples=25, deadline=None)
@given(pass_s=st.floats(0.001, 0.02), token_s=st.floats(1e-5, 4e-4), chunk_tokens=st.sampled_from((256, 1024)))
def test_colocated_rate_is_below_what_either_phase_alone_allows(
    pass_s: float, token_s: float, chunk_tokens: int
) -> None:
    goal = goal_of(prompt=1000, output=100, ttft_s=2.0)
    estimator = estimator_of(goal, pass_s=pass_s, token_s=token_s)
    rate = estimator.colocated_rate(chunk_tokens)

    assert rate <= 1 / estimator.prefill_s(chunk_tokens)
    assert rate * goal.workload.num_output_tokens * token_s <= 1


def test_chunk_sizes_that_cut_a_prompt_alike_are_one() -> None:
    assert chunk_sizes(goal_of(prompt=400)) == (512,)
    assert chunk_sizes(goal_of(prompt=5000)) == (512, 2048, 8192)


def test_families_have_a_colocated_one_and_pairs_that_hold_the_model() -> None:
    found = families(goal_of(model="deepseek-r1", prompt=5000, output=320, rate=3, ttft_s=2, tpot_s=0.02))

    assert any(each.is_colocated for each in found)
    for each in found:
        for pool in each.member(each.most).pools:
            assert pool.placement.kv_tokens > 5320
            assert pool.role is not Role.PREFILL or pool.placement.data_parallel_size == 1


@pytest.mark.parametrize(
    ("ttft_s", "tpot_s", "message"),
    [(1e-4, 0.05, "ttft=0.0001 is below the"), (1.0, 1e-5, "tpot=1e-05 is below the")],
)
def test_targets_that_an_idle_fleet_misses_are_refused(ttft_s: float, tpot_s: float, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        families(goal_of(ttft_s=ttft_s, tpot_s=tpot_s))


def test_load_that_needs_more_accelerators_than_allowed_is_refused() -> None:
    with pytest.raises(ConfigError, match="raise --max-gpus"):
        families(goal_of(rate=5000, max_accelerators=2))


def test_model_that_fits_no_node_is_refused() -> None:
    goal = Goal(
        hardware=hardware("h100"),
        shape=model_shape("deepseek-r1"),
        workload=planned("prompt=100,output=10,rate=1"),
        ttft_s=1,
        tpot_s=1,
    )

    with pytest.raises(ConfigError, match="does not fit"):
        goal.placements()
