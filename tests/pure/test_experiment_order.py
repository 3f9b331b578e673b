"""The experiment on two cores: its order, its arms, and the rules that make a run void."""

import re
from collections import Counter

import pytest

from pdserve.bench.experiment.campaign import expected_s
from pdserve.bench.experiment.conditions import Conditions, void_reason
from pdserve.bench.experiment.points import NUM_HEADLINE_POINTS, POINTS, WHOLE_PROMPT_TOKENS, Arm, Slo, points_named
from pdserve.bench.experiment.schedule import planned_runs
from pdserve.config.role import Role
from pdserve.errors import ConfigError

REFERENCE_S = (0.2, 0.4)


def conditions(
    *, steal: float = 0.0, foreign: float = 0.0, gemms_s: tuple[tuple[float, ...], ...] = (REFERENCE_S, REFERENCE_S)
) -> Conditions:
    return Conditions(steal_share=steal, foreign_share=foreign, own_share=0.8, psi_cpu_share=0.5, gemms_s=gemms_s)


def test_plan_of_all_points_has_every_run_once_in_whole_blocks() -> None:
    runs = planned_runs(POINTS, num_seeds=5)
    assert Counter((run.point, run.seed, run.arm) for run in runs) == Counter(
        (point, seed, arm) for point in POINTS for seed in range(5) for arm in Arm
    )
    blocks = [runs[start : start + len(Arm)] for start in range(0, len(runs), len(Arm))]
    assert all(len({(run.point, run.seed) for run in block}) == 1 for block in blocks)
    assert [run.seed for run in runs] == sorted(run.seed for run in runs)


def test_plan_varies_the_order_of_arms_and_is_the_same_each_time() -> None:
    runs = planned_runs(POINTS, num_seeds=5)
    assert runs == planned_runs(POINTS, num_seeds=5)
    firsts = Counter(run.arm for run in runs[:: len(Arm)])
    assert set(firsts) == set(Arm)


def test_arms_get_the_same_arrivals_of_a_seed_and_other_seeds_get_others() -> None:
    point = POINTS[0]
    lists = [point.workload(prefill_s=0.5, seed=seed).requests(20) for seed in (0, 0, 1)]
    assert lists[0] == lists[1] != lists[2]
    assert {(request.num_prompt_tokens, request.num_output_tokens) for request in lists[0]} == {(256, 64)}


def test_rate_of_a_point_keeps_one_prefill_worker_as_busy_as_it_says() -> None:
    for point in POINTS:
        assert point.rate_per_s(0.25) * 0.25 == pytest.approx(point.utilisation)


def test_arms_pin_each_worker_to_a_core_of_its_own() -> None:
    roles = {arm: sorted(place.role.value for place in arm.places((0, 1))) for arm in Arm}
    assert roles[Arm.WHOLE] == roles[Arm.CHUNKED] == [Role.BOTH.value] * 2
    assert roles[Arm.APART] == sorted([Role.PREFILL.value, Role.DECODE.value])
    for arm in Arm:
        assert sorted(place.cpus for place in arm.places((0, 1))) == [(0,), (1,)]


def test_pass_of_the_prefill_first_arm_takes_the_longest_prompt_whole() -> None:
    longest = max(point.num_prompt_tokens for point in POINTS)
    for arm in (Arm.WHOLE, Arm.APART):
        flags = dict(zip(arm.worker_arguments[::2], arm.worker_arguments[1::2], strict=True))
        assert int(flags["--chunk-tokens"]) == WHOLE_PROMPT_TOKENS >= longest + int(flags["--max-running"])


def test_points_are_chosen_by_name_and_unknown_ones_refused() -> None:
    assert points_named("headline") == POINTS[:NUM_HEADLINE_POINTS]
    assert points_named("all") == POINTS
    assert points_named("64/64@0.3,256/64@0.5") == (POINTS[4], POINTS[0])
    with pytest.raises(ConfigError, match=r"no point '1/2@3'.*64/64@0\.3"):
        points_named("1/2@3")


def test_headline_of_five_seeds_and_a_minute_each_takes_less_than_an_hour() -> None:
    assert expected_s(NUM_HEADLINE_POINTS * 5 * len(Arm), seconds=60.0) < 3600


def test_objective_of_ttft_is_in_prefills_of_the_prompt() -> None:
    objective = Slo(ttft_prefills=4.0, tpot_s=0.1, stall_s=0.5).objective(0.8)
    assert (objective.ttft_s, objective.tpot_s, objective.stall_s) == (3.2, 0.1, 0.5)


@pytest.mark.parametrize(
    "quiet",
    [
        conditions(),
        conditions(steal=0.05, foreign=0.05),
        conditions(gemms_s=((0.218, 0.9), (0.9, 0.362))),
    ],
)
def test_run_within_the_limits_counts_whatever_its_pressure(quiet: Conditions) -> None:
    assert void_reason(quiet, reference_s=REFERENCE_S) is None


@pytest.mark.parametrize(
    ("disturbed", "reason"),
    [
        (conditions(steal=0.06, foreign=0.05), "6% of CPU time stolen and 5% used by others"),
        (conditions(gemms_s=((0.2, 0.5), (0.2, 0.444))), r"took 1\.11 of its reference"),
        (conditions(gemms_s=((0.17, 0.4), (0.21, 0.4))), r"took 0\.85 of its reference"),
    ],
)
def test_run_over_a_limit_is_void_and_says_why(disturbed: Conditions, reason: str) -> None:
    assert re.search(reason, void_reason(disturbed, reference_s=REFERENCE_S) or "")
