"""Immediates and tail slots of one decode worker: bounded, and reused as late as possible (rule H5)."""

from collections import deque

from pdserve.errors import CapacityError, InternalError
from pdserve.fabric.port import IMMEDIATE_GENERATION_BITS, IMMEDIATE_SLOT_BITS
from pdserve.ids import Immediate

_GENERATION_MASK = (1 << IMMEDIATE_GENERATION_BITS) - 1


class SlotPool:
    """Slots `[0, num_slots)`, handed out first-freed-first-used, so that a slot rests before it is used again."""

    def __init__(self, *, num_slots: int, noun: str) -> None:
        self.num_slots = num_slots
        self._noun = noun
        self._free = deque(range(num_slots))
        self._used: set[int] = set()

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> frozenset[int]:
        return frozenset(self._used)

    def allocate(self) -> int:
        """Raises: `CapacityError` when all are in use."""
        if not self._free:
            raise CapacityError(f"all {self.num_slots} {self._noun}s are in use", retry_after_s=1.0)
        slot = self._free.popleft()
        self._used.add(slot)
        return slot

    def release(self, slot: int) -> None:
        """Raises: `InternalError` when the slot is not in use; nothing changed then."""
        if slot not in self._used:
            raise InternalError(f"{self._noun} {slot} was released, but is not in use")
        self._used.remove(slot)
        self._free.append(slot)


class ImmediatePool:
    """Immediates of `(slot << 12) | generation`; each release moves the slot to its next generation."""

    def __init__(self, *, num_slots: int) -> None:
        if not 0 < num_slots <= 1 << IMMEDIATE_SLOT_BITS:
            raise InternalError(f"{num_slots} immediate slots do not fit {IMMEDIATE_SLOT_BITS} bits")
        self.num_slots = num_slots
        self._slots = SlotPool(num_slots=num_slots, noun="immediate")
        self._generations = [0] * num_slots

    @property
    def num_free(self) -> int:
        return self._slots.num_free

    @property
    def used(self) -> frozenset[Immediate]:
        return frozenset(self._immediate(slot) for slot in self._slots.used)

    def allocate(self) -> Immediate:
        """Raises: `CapacityError` when all are in use."""
        return self._immediate(self._slots.allocate())

    def release(self, immediate: Immediate) -> None:
        """Requires: no write under `immediate` is in flight or will be posted."""
        slot = immediate >> IMMEDIATE_GENERATION_BITS
        if self._generations[slot] != immediate & _GENERATION_MASK:
            raise InternalError(f"immediate {immediate:#x} is of an old generation")
        self._slots.release(slot)
        self._generations[slot] = (self._generations[slot] + 1) & _GENERATION_MASK

    def _immediate(self, slot: int) -> Immediate:
        return Immediate(slot << IMMEDIATE_GENERATION_BITS | self._generations[slot])
