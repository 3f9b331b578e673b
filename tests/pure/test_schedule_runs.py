"""Fixed runs of the scheduler machine: they get to hard places that random runs may miss."""

import pytest
from tests.pure.test_schedule_machine import SPECULATIONS, ScheduleMachine

from pdserve.config.speculation import Speculation


def test_schedule_machine_reaches_preemption_and_stall() -> None:
    machine = ScheduleMachine()
    for _ in range(3):
        machine.add_handed_over(num_prompt_tokens=13, max_tokens=8, handoff_ms=0)
    machine.grant_pages(num_pages=3)
    for _ in range(12):
        machine.start_pass()
        if machine.batch is not None:
            machine.finish_pass()
    assert machine.scheduler.num_preemptions > 0
    machine.teardown()


@pytest.mark.parametrize("max_tokens", [1, 12])
def test_schedule_machine_lone_sequence_ends(max_tokens: int) -> None:
    machine = ScheduleMachine()
    machine.add(num_prompt_tokens=30, max_tokens=max_tokens)
    machine.teardown()


@pytest.mark.parametrize("speculation", SPECULATIONS[1:])
def test_schedule_machine_with_drafts_reaches_the_same_tokens_in_fewer_passes(speculation: Speculation) -> None:
    num_passes: list[int] = []
    for variant in (None, speculation):
        machine = ScheduleMachine()
        machine.speculate(variant)
        machine.fork_landed(num_prompt_tokens=12, max_tokens=12, num_choices=2)
        machine.add(num_prompt_tokens=12, max_tokens=12)
        machine.teardown()
        num_passes.append(machine.num_passes)
    without, with_drafts = num_passes
    assert with_drafts < without
