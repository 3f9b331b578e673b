"""Loads that are not all alike: what is known of their lengths, and plans for them."""

import argparse
from dataclasses import replace
from pathlib import Path

import pytest
from tests.pure.planned_loads import planned

from pdserve.cli.plan_load import add_load_flags, check_load_flags, planned_load
from pdserve.errors import ConfigError
from pdserve.perfmodel.fitted import affine_model
from pdserve.perfmodel.hardware import hardware
from pdserve.perfmodel.model_shape import model_shape
from pdserve.perfmodel.placement import Placement
from pdserve.planner.estimate import Estimator
from pdserve.planner.goal import Goal
from pdserve.planner.load import PlannedLoad
from pdserve.workload.request import WorkloadRequest


def load_of(lengths: list[tuple[int, int]], *, rate_per_s: float = 1.0) -> PlannedLoad:
    return PlannedLoad.of(
        [
            WorkloadRequest(arrival_s=index / rate_per_s, num_prompt_tokens=prompt, num_output_tokens=output)
            for index, (prompt, output) in enumerate(lengths)
        ],
        rate_per_s=rate_per_s,
    )


def planned_by(*flags: str) -> PlannedLoad:
    parser = argparse.ArgumentParser()
    add_load_flags(parser)
    arguments = parser.parse_args(flags)
    check_load_flags(arguments)
    return planned_load(arguments)


def test_load_knows_the_lengths_of_its_requests() -> None:
    load = load_of([(100, 10)] * 9 + [(1100, 20)])

    assert (load.num_prompt_tokens, load.num_output_tokens, load.most_tokens) == (200, 11, 1120)
    assert load.prompt_cv == pytest.approx(300 / 200)
    assert [load.prompt_tokens_within(share) for share in (0.01, 0.9, 0.91, 1.0)] == [100, 100, 1100, 1100]
    assert str(load) == "1 requests/s of 200 + 11 tokens on average"


def test_load_of_requests_that_are_alike_is_written_without_an_average() -> None:
    assert str(planned("prompt=5000,output=320,rate=3")) == "3 requests/s of 5000 + 320 tokens"


def test_estimates_of_a_spread_load_wait_longer_and_answer_long_prompts_later() -> None:
    spread = load_of([(100, 10)] * 5 + [(300, 10)] * 5, rate_per_s=5.0)
    goal = Goal(
        hardware=hardware("h200"),
        shape=model_shape("llama-3.1-8b"),
        workload=spread,
        ttft_s=1.0,
        tpot_s=0.05,
    )
    placement = Placement(hardware=goal.hardware, shape=goal.shape, tensor_parallel_size=1)
    model = affine_model(provenance="a test", pass_s=0.0, token_s=5e-4)
    estimator = Estimator(goal=goal, placement=placement, model=model)
    uniform = replace(estimator, goal=replace(goal, workload=planned("prompt=200,output=10,rate=5")))

    assert estimator.prefill_s(2048) == pytest.approx(uniform.prefill_s(2048)) == pytest.approx(0.1)
    assert estimator.idle_ttft_s(2048) - uniform.idle_ttft_s(2048) == pytest.approx(0.05)
    waits = [
        each.prefill_ttft_s(5.0, num_workers=1, chunk_tokens=2048) - each.idle_ttft_s(2048)
        for each in (estimator, uniform)
    ]
    assert waits[0] / waits[1] == pytest.approx(1 + 0.5**2)


def test_planned_load_of_lengths_and_of_the_same_as_synthetic_is_one() -> None:
    lengths = planned_by("--workload", "prompt=300,output=20,prefix=100", "--rate", "4")

    assert lengths.rate_per_s == 4.0
    assert lengths.num_prefix_tokens == 100
    assert len(lengths.requests) == 300
    assert planned_by("--workload", "synthetic:prompt=300,output=20,prefix=100,rate=4") == lengths
    assert planned_by("--workload", "synthetic:prompt=300,output=20,prefix=100,rate=9", "--rate", "4") == lengths


def write_trace(path: Path, *, num_rows: int, period_ms: int) -> str:
    row = '{"timestamp": %d, "input_length": %d, "output_length": 3, "hash_ids": [%d]}\n'
    path.write_text("".join(row % (period_ms * index, 100 + index, index) for index in range(num_rows)))
    return f"mooncake:{path}"


def test_planned_load_of_a_trace_has_its_lengths_at_the_rate_asked_for(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "trace.jsonl", num_rows=80, period_ms=10_000)
    as_it_was = planned_by("--trace", trace, "--requests", "60")
    faster = planned_by("--trace", trace, "--requests", "60", "--rate", "5")

    assert as_it_was.prompt_lengths == faster.prompt_lengths == tuple(range(100, 160))
    assert as_it_was.rate_per_s == pytest.approx(0.1, rel=0.02)
    assert faster.rate_per_s == 5.0
    assert 59 / (faster.requests[-1].arrival_s - faster.requests[0].arrival_s) == pytest.approx(5.0)


@pytest.mark.parametrize("num_rows", [1, 49])
def test_planned_load_of_a_trace_too_short_to_judge_by_is_refused(num_rows: int, tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "trace.jsonl", num_rows=num_rows, period_ms=10_000)

    with pytest.raises(ConfigError, match=f"has {num_rows} requests; a plan needs 50"):
        planned_by("--trace", trace)
