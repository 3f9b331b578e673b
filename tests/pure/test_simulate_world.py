"""Worlds by seed: every rule is kept, a seed gives the same world again, and planted bugs are found."""

import pytest

from pdserve.cli.main import main
from pdserve.simulate.plan import plan_of
from pdserve.simulate.planted import Plant, planted
from pdserve.simulate.simulation import minimise, run, simulate
from pdserve.simulate.world import World

NUM_SEEDS = 16
MAX_SEEDS_TO_FIND = 200


def seed_that_finds(plant: Plant) -> int:
    """The first one whose world breaks a rule with the bug."""
    for seed in range(MAX_SEEDS_TO_FIND):
        if simulate(seed, with_faults=True, plant=plant, explains=False).violation is not None:
            return seed
    pytest.fail(f"no seed below {MAX_SEEDS_TO_FIND} finds {plant.value}")


@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_world_with_faults_keeps_every_rule(seed: int) -> None:
    outcome = simulate(seed, with_faults=True, explains=True)
    assert outcome.violation is None, "\n".join([str(outcome.violation), *outcome.log])


@pytest.mark.parametrize("seed", range(4))
def test_calm_world_answers_whoever_has_time_and_room(seed: int) -> None:
    world = World(plan_of(seed, with_faults=False))
    try:
        assert world.run() is None
        endings = {ending for client in world.clients for ending in client.endings}
        assert "answered" in endings
        assert endings <= {"answered", "left", "refused 429", "refused 504"}
    finally:
        world.close()


def test_world_of_a_seed_is_the_same_again() -> None:
    def story(seed: int) -> list[str]:
        world = World(plan_of(seed, with_faults=True))
        try:
            world.run()
            return world.journal.lines(about=(), max_lines=10_000)
        finally:
            world.close()

    assert story(5) == story(5)
    assert story(5) != story(6)


@pytest.mark.parametrize("plant", list(Plant))
def test_planted_bug_is_found_where_the_code_without_it_passes(plant: Plant) -> None:
    seed = seed_that_finds(plant)
    assert simulate(seed, with_faults=True, explains=False).violation is None


def test_violation_is_shown_in_the_smallest_plan_that_has_it() -> None:
    plan = plan_of(seed_that_finds(Plant.COUNT_ONE_LESS), with_faults=True)
    with planted(Plant.COUNT_ONE_LESS):
        violation, _ = run(plan)
        assert violation is not None
        smallest, found, log = minimise(plan, violation)
    assert len(smallest.faults) + len(smallest.arrivals) < len(plan.faults) + len(plan.arrivals)
    assert found.rule[:2] == violation.rule[:2]
    assert log


def test_command_counts_what_it_ran_and_succeeds(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--faults", "--seeds", "2", "--jobs", "1"]) == 0
    plans = [plan_of(seed, with_faults=True) for seed in range(2)]
    num_requests, num_faults = sum(len(plan.arrivals) for plan in plans), sum(len(plan.faults) for plan in plans)
    counted = f"seeds=2 requests={num_requests} faults={num_faults} violations=0"
    assert capsys.readouterr().out == f"simulate: ok {counted}\n"


def test_command_that_finds_a_violation_shows_how_to_see_it_again(capsys: pytest.CaptureFixture[str]) -> None:
    seed = seed_that_finds(Plant.COUNT_ONE_LESS)
    assert main(["simulate", "--faults", "--plant", "count-one-less", "--seed", str(seed)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"seed {seed}: H")
    assert lines[-2].endswith(f"again: pdserve simulate --faults --plant count-one-less --seed {seed}")
    assert lines[-1].endswith("violations=1")


@pytest.mark.parametrize("flags", [["--seeds", "0"], ["--jobs", "0"], ["--seed", "3", "--first-seed", "2"]])
def test_command_with_flags_that_make_no_sense_says_so(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *flags]) == 2
    assert capsys.readouterr().err.startswith("pdserve simulate: --seed")
