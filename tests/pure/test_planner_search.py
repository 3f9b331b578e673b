"""The search for the smallest fleet: what it finds where the answer is planted, and what it says of it."""

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.pure.planned_loads import planned

from pdserve.cli import plan as plan_command
from pdserve.cli.plan_table import format_plan
from pdserve.config.role import Role
from pdserve.errors import ConfigError
from pdserve.perfmodel.hardware import hardware
from pdserve.perfmodel.model_shape import model_shape
from pdserve.planner.candidate import Candidate
from pdserve.planner.goal import Goal
from pdserve.planner.options import families
from pdserve.planner.search import Plan, Verdict, search, verdict_of
from pdserve.simulate.fleet.result import ANSWERED, FleetResult

GOAL = Goal(
    hardware=hardware("h200"),
    shape=model_shape("deepseek-r1"),
    workload=planned("prompt=5000,output=320,rate=3"),
    ttft_s=2,
    tpot_s=0.02,
)
OTHER_STATUS = 503


def workers(candidate: Candidate, role: Role) -> int:
    return sum(pool.num_workers for pool in candidate.pools if pool.role is role)


def verdict(candidate: Candidate, attainment: float) -> Verdict:
    return Verdict(
        candidate=candidate,
        attainment=attainment,
        ttft_s_p50=0.5,
        ttft_s_p90=1.0 if attainment > 0.5 else 3.0,
        tpot_s_p50=0.01,
        tpot_s_p90=0.015,
        utilisation={pool.role: 0.5 + 0.1 * index for index, pool in enumerate(candidate.pools)},
    )


def planted(is_enough: Callable[[Candidate], bool]) -> Callable[[Goal, Candidate], Verdict]:
    return lambda goal, candidate: verdict(candidate, 1.0 if is_enough(candidate) else 0.25)


def plan_where(is_enough: Callable[[Candidate], bool], *, on_run: Callable[[str], None] = lambda line: None) -> Plan:
    return search(GOAL, planted(is_enough), on_run=on_run)


def test_search_finds_the_smallest_fleet_of_each_kind() -> None:
    plan = plan_where(
        lambda fleet: (
            workers(fleet, Role.BOTH) >= 11 or (workers(fleet, Role.PREFILL) >= 1 and workers(fleet, Role.DECODE) >= 5)
        )
    )

    assert plan.disaggregated is not None
    assert plan.colocated is not None
    assert workers(plan.disaggregated.candidate, Role.PREFILL) == 1
    assert workers(plan.disaggregated.candidate, Role.DECODE) == 5
    assert workers(plan.colocated.candidate, Role.BOTH) == 11
    assert plan.best == plan.disaggregated


def test_search_recommends_colocated_workers_where_splitting_does_not_pay() -> None:
    plan = plan_where(lambda fleet: workers(fleet, Role.BOTH) >= 4 or workers(fleet, Role.DECODE) >= 6)

    assert plan.best.candidate.is_colocated
    assert "goodput a GPU apart is" in format_plan(plan, gpu_hour_cost=None)


def test_search_simulates_few_fleets_and_none_twice() -> None:
    seen: list[str] = []
    plan_where(lambda fleet: workers(fleet, Role.DECODE) >= 4 or workers(fleet, Role.BOTH) >= 9, on_run=seen.append)

    assert len(seen) == len(set(seen))
    assert len(seen) <= 4 * len(families(GOAL))


def test_search_without_a_fleet_that_does_says_what_comes_closest() -> None:
    plan = search(GOAL, lambda goal, fleet: verdict(fleet, 0.01 * fleet.num_accelerators / 8), on_run=lambda line: None)
    report = format_plan(plan, gpu_hour_cost=None)

    assert not plan.best.meets(GOAL)
    assert plan.best.candidate.num_accelerators == max(
        8 * each.most + sum(pool.num_accelerators for pool in each.fixed) for each in families(GOAL)
    )
    assert report.startswith("no plan: ")
    assert "what comes closest misses TTFT" in report


def test_search_keeps_within_the_accelerators_allowed() -> None:
    goal = replace(GOAL, max_accelerators=40)
    seen: list[int] = []

    def simulate(goal: Goal, fleet: Candidate) -> Verdict:
        seen.append(fleet.num_accelerators)
        return verdict(fleet, 0.5)

    search(goal, simulate, on_run=lambda line: None)

    assert max(seen) <= 40


def test_plan_report_gives_goodput_cost_busy_pools_and_provenance() -> None:
    plan = plan_where(lambda fleet: workers(fleet, Role.DECODE) >= 4 or workers(fleet, Role.BOTH) >= 9)
    report = format_plan(plan, gpu_hour_cost=2.0)

    assert report.startswith("plan: 1 prefill (TP8, chunks of 8192) + 4 decode (TP8), 40 h200")
    # 3 requests of 320 tokens a second on 40 GPUs at 2 an hour.
    assert f"{1e6 * 40 * 2 / (3 * 320 * 3600):.2f}" in report
    assert f"{3 / 40:.4f}" in report
    assert "decode saturates first" in report
    assert "aiconfigurator-core" in report
    assert "they follow from the model's form" in report


def test_verdict_leaves_out_the_first_requests_and_counts_refusals_as_misses() -> None:
    candidate = families(GOAL)[0].member(4)
    ttft_s = np.array([9.0, 9.0, 0.5, 0.5, 0.5, 0.5, 0.5, 3.0, 0.5, np.nan])
    tpot_s = np.array([0.9, 0.9, 0.01, 0.01, 0.01, 0.01, 0.01, 0.01, 0.03, np.nan])
    zeros = np.zeros(10)
    result = FleetResult(
        arrival_s=zeros,
        num_prompt_tokens=np.zeros(10, np.int32),
        num_output_tokens=np.zeros(10, np.int32),
        status=np.array([ANSWERED] * 9 + [OTHER_STATUS], np.int16),
        ttft_s=ttft_s,
        tpot_s=tpot_s,
        worst_gap_s=zeros,
        e2e_s=zeros,
        exposed_s=zeros,
        utilisation={Role.PREFILL: 0.4, Role.DECODE: 0.8},
        span_s=1.0,
    )
    found = verdict_of(GOAL, candidate, result)

    # Of the 7 that count and were answered, the 4th and the 7th: figures of requests, not what lies between two.
    assert (found.ttft_s_p50, found.ttft_s_p90, found.tpot_s_p90) == (0.5, 3.0, 0.03)

    assert found.attainment == pytest.approx(5 / 8)
    assert found.busiest is Role.DECODE


def arguments_of(**changed: str) -> argparse.Namespace:
    """`without=NAME,NAME` leaves flags out."""
    parser = argparse.ArgumentParser()
    plan_command.add_parser(parser.add_subparsers())
    flags = {
        "--hardware": "h200",
        "--model": "llama-3.1-8b",
        "--workload": "prompt=500,output=20",
        "--rate": "20",
        "--slo": "ttft=1,tpot=0.05",
        "--requests": "60",
        "--jobs": "1",
    }
    for name in changed.pop("without", "").split(","):
        flags.pop(f"--{name}", None)
    flags |= {f"--{name.replace('_', '-')}": value for name, value in changed.items()}
    return parser.parse_args(["plan", *(part for pair in flags.items() for part in pair)])


def test_plan_of_a_small_load_is_simulated_printed_and_drawn(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    plot = tmp_path / "plan.png"
    exit_code = plan_command.run(arguments_of(gpu_hour_cost="3", plot=str(plot)))
    report = capsys.readouterr().out

    assert exit_code == 0
    assert report.startswith("plan: ")
    assert "per M tokens" in report
    assert "saturates first" in report
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"hardware": "h300"}, "hardware 'h300' is not known; known are"),
        ({"model": "gpt-7"}, "model 'gpt-7' is not known; known are"),
        ({"workload": "prompt=500"}, "needs output"),
        ({"workload": "prompt=x,output=20"}, "prompt=x"),
        ({"without": "rate"}, "needs --rate"),
        ({"without": "rate", "workload": "synthetic:prompt=500,output=20"}, "needs rate"),
        ({"without": "workload", "trace": "nothing"}, "is no FORMAT:FILE"),
        ({"without": "workload", "trace": "azure:/nowhere"}, "can't be read"),
        ({"without": "workload", "from": "http://127.0.0.1:9"}, "leave --rate out"),
        ({"without": "workload,rate", "from": "127.0.0.1:9"}, "is no URL"),
        ({"without": "workload,rate", "from": "http://127.0.0.1:9"}, "is it the gateway?"),
        ({"without": "workload,rate", "from": "http://127.0.0.1:9", "window": "0"}, "--window must be"),
        ({"window": "5"}, "--window goes with --from"),
        ({"jobs": "0"}, "--jobs must be"),
        ({"rate": "0"}, "--rate must be over 0"),
        ({"rate": "nan"}, "--rate must be over 0"),
        ({"slo": "ttft=1"}, "a plan needs both limits, as in ttft=2,tpot=0.02"),
        ({"slo": "ttft=1,tpot=fast"}, "an objective of tpot=fast can't be met: it must be seconds, over 0"),
        (
            {"slo": "ttft=1,tpot=0.1,stall=2"},
            "'stall=2' is no part of an objective; it knows ttft, tpot",
        ),
        ({"slo": "ttft=1,tpot=0.000001"}, "below the"),
        ({"attainment": "2"}, "--attainment must be"),
        ({"requests": "5"}, "--requests must be"),
        ({"max_gpus": "0"}, "--max-gpus must be"),
        ({"gpu_hour_cost": "-1"}, "--gpu-hour-cost must be"),
        ({"tables": "/no/such/place"}, "is not a directory"),
        ({"plot": "/no/such/place/plan.png"}, "its directory is missing"),
    ],
)
def test_plan_for_what_makes_no_sense_is_refused_in_one_line(changed: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        plan_command.run(arguments_of(**changed))

    assert message in refusal.value.message
    assert "\n" not in refusal.value.message
