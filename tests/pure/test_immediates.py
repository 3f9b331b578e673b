"""Slots and immediates: bounded, never handed out twice, and reused as late as possible (rule H5)."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pdserve.errors import CapacityError, InternalError
from pdserve.fabric.port import IMMEDIATE_GENERATION_BITS, IMMEDIATE_SLOT_BITS
from pdserve.ids import Immediate
from pdserve.transfer.immediates import ImmediatePool, SlotPool

NUM_SLOTS = 5
NUM_GENERATIONS = 1 << IMMEDIATE_GENERATION_BITS


class ImmediateMachine(RuleBasedStateMachine):
    """The pool beside a reference that remembers every immediate it ever saw."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = ImmediatePool(num_slots=NUM_SLOTS)
        self.in_use: list[Immediate] = []
        self.released: list[Immediate] = []

    @precondition(lambda self: len(self.in_use) < NUM_SLOTS)
    @rule()
    def allocate(self) -> None:
        immediate = self.pool.allocate()
        assert 0 <= immediate < 1 << 32
        assert immediate not in self.in_use
        assert immediate not in self.released
        self.in_use.append(immediate)

    @precondition(lambda self: len(self.in_use) == NUM_SLOTS)
    @rule()
    def allocate_too_many(self) -> None:
        with pytest.raises(CapacityError, match="all 5 immediates are in use"):
            self.pool.allocate()

    @precondition(lambda self: self.in_use)
    @rule(position=st.integers(0, NUM_SLOTS - 1))
    def release(self, position: int) -> None:
        immediate = self.in_use.pop(position % len(self.in_use))
        self.pool.release(immediate)
        self.released.append(immediate)

    @precondition(lambda self: self.released)
    @rule()
    def release_again(self) -> None:
        with pytest.raises(InternalError):
            self.pool.release(self.released[-1])

    @invariant()
    def free_and_used_make_up_the_pool(self) -> None:
        assert self.pool.num_free + len(self.in_use) == NUM_SLOTS


TestImmediateMachine = ImmediateMachine.TestCase
TestImmediateMachine.settings = settings(max_examples=50, stateful_step_count=40)


def test_slot_released_first_rests_longest() -> None:
    pool = SlotPool(num_slots=3, noun="tail slot")
    slots = [pool.allocate() for _ in range(3)]
    for slot in (1, 0, 2):
        pool.release(slot)
    assert slots == [0, 1, 2]
    assert [pool.allocate() for _ in range(3)] == [1, 0, 2]


def test_slots_when_all_are_used_are_refused_with_a_time_to_come_back() -> None:
    pool = SlotPool(num_slots=1, noun="tail slot")
    pool.allocate()
    with pytest.raises(CapacityError, match="all 1 tail slots are in use") as refusal:
        pool.allocate()
    assert refusal.value.retry_after_s > 0


@pytest.mark.parametrize("slot", [-1, 0, 1, 7])
def test_slot_not_in_use_is_not_released(slot: int) -> None:
    pool = SlotPool(num_slots=2, noun="tail slot")
    with pytest.raises(InternalError, match=f"tail slot {slot} was released"):
        pool.release(slot)
    assert pool.num_free == 2


def test_immediate_of_a_slot_comes_again_after_all_generations() -> None:
    pool = ImmediatePool(num_slots=1)
    seen: list[Immediate] = []
    for _ in range(NUM_GENERATIONS + 1):
        seen.append(pool.allocate())
        pool.release(seen[-1])
    assert seen == [*range(NUM_GENERATIONS), 0]


def test_immediate_of_an_old_generation_is_not_released() -> None:
    pool = ImmediatePool(num_slots=1)
    old = pool.allocate()
    pool.release(old)
    current = pool.allocate()
    with pytest.raises(InternalError, match="old generation"):
        pool.release(old)
    pool.release(current)
    assert pool.num_free == 1


@pytest.mark.parametrize("num_slots", [0, -1, (1 << IMMEDIATE_SLOT_BITS) + 1])
def test_immediate_slots_that_do_not_fit_their_bits_are_refused(num_slots: int) -> None:
    with pytest.raises(InternalError, match="do not fit 20 bits"):
        ImmediatePool(num_slots=num_slots)


def test_immediate_of_the_last_slot_fits_32_bits() -> None:
    pool = ImmediatePool(num_slots=1 << IMMEDIATE_SLOT_BITS)
    immediates = {pool.allocate() for _ in range(pool.num_free)}
    assert max(immediates) >> IMMEDIATE_GENERATION_BITS == (1 << IMMEDIATE_SLOT_BITS) - 1
    assert max(immediates) < 1 << 32
