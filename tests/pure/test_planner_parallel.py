"""The search in several processes, against the one in this process."""

import multiprocessing
import os
import signal
import threading
from dataclasses import replace

import pytest
from tests.pure.planned_loads import planned

from pdserve.config.role import Role
from pdserve.errors import ConfigError, InternalError
from pdserve.perfmodel.hardware import hardware
from pdserve.perfmodel.model_shape import model_shape
from pdserve.planner.candidate import Candidate
from pdserve.planner.goal import Goal
from pdserve.planner.parallel import next_candidates, search_in_parallel
from pdserve.planner.search import Verdict, kinds, search

GOAL = Goal(
    hardware=hardware("h200"),
    shape=model_shape("deepseek-r1"),
    workload=planned("prompt=5000,output=320,rate=3"),
    ttft_s=2,
    tpot_s=0.02,
)


def planted(goal: Goal, candidate: Candidate) -> Verdict:
    """Three decode workers are enough, or six colocated ones."""
    counts = {pool.role: pool.num_workers for pool in candidate.pools}
    is_enough = counts.get(Role.DECODE, 0) >= 3 or counts.get(Role.BOTH, 0) >= 6
    return Verdict(
        candidate=candidate,
        attainment=1.0 if is_enough else 0.5,
        ttft_s_p50=0.5,
        ttft_s_p90=1.0,
        tpot_s_p50=0.01,
        tpot_s_p90=0.015,
        utilisation=dict.fromkeys(counts, 0.5),
    )


def killed(goal: Goal, candidate: Candidate) -> Verdict:
    os.kill(os.getpid(), signal.SIGKILL)
    return planted(goal, candidate)


def endless_if_colocated(goal: Goal, candidate: Candidate) -> Verdict:
    if candidate.pools[0].role is Role.BOTH:
        threading.Event().wait()
    return planted(goal, candidate)


@pytest.mark.parametrize("num_processes", [1, 2, 5])
def test_search_in_parallel_finds_and_says_what_the_search_does(num_processes: int) -> None:
    lines: list[str] = []
    expected_lines: list[str] = []
    expected = search(GOAL, planted, on_run=expected_lines.append)
    plan = search_in_parallel(GOAL, num_processes=num_processes, on_run=lines.append, simulate=planted)

    assert plan == expected
    assert lines == expected_lines
    assert not multiprocessing.active_children()


def test_next_candidates_are_those_needed_for_certain_then_those_after_either_verdict() -> None:
    apart, colocated = kinds(GOAL)
    wanted = next_candidates(GOAL, (apart, colocated), {}, num_most=5)
    firsts = [kind[0].member(kind[0].varied.num_workers) for kind in (apart, colocated)]

    assert wanted[:2] == firsts
    assert len(set(wanted)) == 5
    for attainment in (1.0, 0.0):
        known = {firsts[0]: replace(planted(GOAL, firsts[0]), attainment=attainment)}
        assert next_candidates(GOAL, (apart,), known, num_most=1)[0] in wanted[2:4]


def test_search_whose_processes_are_killed_says_so_and_leaves_none() -> None:
    with pytest.raises(InternalError, match="fewer --jobs"):
        search_in_parallel(GOAL, num_processes=2, on_run=lambda line: None, simulate=killed)
    assert not multiprocessing.active_children()


def test_search_that_is_interrupted_leaves_no_process() -> None:
    lines: list[str] = []

    def interrupt(line: str) -> None:
        lines.append(line)
        if len(lines) == 2:  # A verdict has come, and the other process has its endless simulation.
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        search_in_parallel(GOAL, num_processes=2, on_run=interrupt, simulate=endless_if_colocated)
    assert not multiprocessing.active_children()


def test_search_in_parallel_for_what_no_fleet_can_do_is_refused() -> None:
    with pytest.raises(ConfigError, match="below the"):
        search_in_parallel(replace(GOAL, tpot_s=1e-6), num_processes=2, on_run=lambda line: None, simulate=planted)
