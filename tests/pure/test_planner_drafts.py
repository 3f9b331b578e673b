"""Plans for engines that draft: the estimates, the fleets that are simulated, and what the report says."""

from dataclasses import replace
from functools import cache

import pytest
from tests.pure.planned_loads import planned

from pdserve.cli.main import main
from pdserve.cli.plan_table import format_plan
from pdserve.config.role import Role
from pdserve.errors import ConfigError
from pdserve.perfmodel.fitted import affine_model
from pdserve.perfmodel.hardware import hardware
from pdserve.perfmodel.model_shape import model_shape
from pdserve.perfmodel.placement import Placement
from pdserve.planner.estimate import Estimator
from pdserve.planner.goal import Goal
from pdserve.planner.options import families
from pdserve.planner.search import Plan, search, simulated
from pdserve.simulate.fleet.drafting import NO_DRAFTS, Drafting

ONE_DRAFT = Drafting(num_drafts=1, acceptance=0.8)
GOAL = Goal(
    hardware=hardware("h200"),
    shape=model_shape("llama-3.1-70b"),
    workload=planned("prompt=1000,output=100,rate=16"),
    ttft_s=2.0,
    tpot_s=0.012,
)


def estimator_of(drafting: Drafting, *, token_s: float = 0.0001) -> Estimator:
    return Estimator(
        goal=replace(GOAL, drafting=drafting),
        placement=Placement(hardware=GOAL.hardware, shape=GOAL.shape, tensor_parallel_size=8),
        model=affine_model(provenance="a test", pass_s=0.01, token_s=token_s),
    )


def test_estimated_step_with_drafts_computes_them_and_gives_more_tokens() -> None:
    """80 layers: a draft takes the time of 2 more, and of a prompt's pass 1."""
    plain, drafted = estimator_of(NO_DRAFTS), estimator_of(ONE_DRAFT)
    assert plain.step_s(10) == pytest.approx(0.011)
    assert drafted.step_s(10) == pytest.approx(0.012 * 82 / 80)
    assert plain.token_s(10) == plain.step_s(10)
    assert drafted.token_s(10) == pytest.approx(drafted.step_s(10) / 1.8)
    assert drafted.prefill_s(8192) == pytest.approx(plain.prefill_s(8192) * 81 / 80)


@pytest.mark.parametrize("chunk_tokens", [512, 2048])
def test_estimated_rates_rise_with_drafts_that_are_right_and_fall_with_those_that_are_not(chunk_tokens: int) -> None:
    never, plain, mostly = (
        estimator_of(drafting) for drafting in (replace(ONE_DRAFT, acceptance=0.0), NO_DRAFTS, ONE_DRAFT)
    )
    assert never.decode_rate() < plain.decode_rate() < mostly.decode_rate()
    assert never.colocated_rate(chunk_tokens) < plain.colocated_rate(chunk_tokens)
    assert never.colocated_rate(chunk_tokens) < mostly.colocated_rate(chunk_tokens)


def test_colocated_estimate_has_no_drafts_in_passes_that_a_chunk_fills() -> None:
    """Prompts of 1,000 tokens: a chunk of 1,000 leaves no room in a pass of 1,000, and much in one of 2,048. With
    decode tokens that cost nothing, only what a pass yields differs."""
    goal = replace(GOAL, drafting=ONE_DRAFT, tpot_s=0.007)
    filled, roomy = (
        replace(estimator_of(ONE_DRAFT, token_s=1e-6), goal=goal).colocated_rate(chunk_tokens)
        for chunk_tokens in (1000, 2048)
    )
    assert filled < roomy


def test_target_below_that_of_an_idle_fleet_is_refused_later_with_drafts() -> None:
    with pytest.raises(ConfigError, match=r"tpot=0\.006 is below the"):
        families(replace(GOAL, tpot_s=0.006))
    assert families(replace(GOAL, tpot_s=0.006, drafting=ONE_DRAFT))


def test_decode_pool_of_a_plan_with_drafts_has_room_for_all_of_them() -> None:
    goal = replace(GOAL, drafting=Drafting(num_drafts=3, acceptance=0.8))
    pools = families(goal)[0].member(1).fleet_plan(goal.drafting).pools
    plain = families(GOAL)[0].member(1).fleet_plan().pools
    assert pools[Role.DECODE].saturation_tokens == 4 * plain[Role.DECODE].saturation_tokens
    assert pools[Role.PREFILL].saturation_tokens == plain[Role.PREFILL].saturation_tokens


@cache
def plan_with(drafting: Drafting) -> Plan:
    return search(replace(GOAL, drafting=drafting), simulated, on_run=lambda line: None)


def test_plan_with_drafts_needs_no_more_accelerators_and_here_fewer() -> None:
    plain, drafted = plan_with(NO_DRAFTS), plan_with(ONE_DRAFT)
    for before, after in ((plain.disaggregated, drafted.disaggregated), (plain.colocated, drafted.colocated)):
        assert before is not None
        assert after is not None
        assert before.meets(plain.goal)
        assert after.meets(drafted.goal)
        assert after.candidate.num_accelerators <= before.candidate.num_accelerators
    assert drafted.best.candidate.num_accelerators < plain.best.candidate.num_accelerators


def test_plan_report_says_which_drafts_it_was_made_with() -> None:
    reason = "- decoding with 1 draft a pass, each taken to be right 80% of the time"
    assert reason in format_plan(plan_with(ONE_DRAFT), gpu_hour_cost=None)
    assert "draft" not in format_plan(plan_with(NO_DRAFTS), gpu_hour_cost=None)


def test_plan_command_refuses_drafts_that_make_no_sense_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    goal = ["plan", "--hardware", "h200", "--model", "llama-3.1-8b", "--slo", "ttft=1,tpot=0.05", "--rate", "20"]
    load = ["--workload", "prompt=500,output=20"]
    assert main([*goal, *load, "--speculate", "drafts=1,accept=2"]) == 2
    error = capsys.readouterr().err
    assert "accept=2 of --speculate must be a probability of 0 to 1" in error
    assert error.count("\n") == 1
