"""Counted immediates of one in-process fabric; the rules are those of `native/fabric/immediate_table.h`."""

from dataclasses import dataclass, field

from pdserve.errors import FabricError
from pdserve.fabric.port import IMMEDIATE_GENERATION_BITS, ExpectationExpired, Landed
from pdserve.ids import Immediate

NUM_GENERATIONS = 1 << IMMEDIATE_GENERATION_BITS


@dataclass(slots=True)
class _Counter:
    num_expected: int | None = None
    """None while nobody waits."""
    arrivals_ns: list[int] = field(default_factory=list[int])
    record_arrivals: bool = False
    expectation_index: int = 0


class Arrivals:
    """Counters by immediate, made by the first arrival or by `expect`, whichever comes first."""

    def __init__(self) -> None:
        self._counters: dict[Immediate, _Counter] = {}
        self._closed_generations: dict[int, int] = {}
        self._num_expectations = 0
        self.num_received = 0
        self.num_stale = 0

    def arrive(self, immediate: Immediate, now_ns: int) -> Landed | None:
        """Count one write."""
        self.num_received += 1
        if immediate not in self._counters and self._is_closed(immediate):
            self.num_stale += 1
            return None
        counter = self._counters.setdefault(immediate, _Counter())
        counter.arrivals_ns.append(now_ns)
        return self._landed(immediate, counter)

    def expect(self, immediate: Immediate, num_writes: int, *, record_arrivals: bool) -> tuple[int, Landed | None]:
        """A number for `expire`, and the landing when everything is here already. Raises: `FabricError`."""
        if num_writes < 1:
            raise FabricError("expect: at least one write must be expected", operation="expect")
        if self._is_closed(immediate):
            raise FabricError(f"expect: immediate {immediate} is of a closed generation", operation="expect")
        counter = self._counters.setdefault(immediate, _Counter())
        if counter.num_expected is not None:
            raise FabricError(f"expect: immediate {immediate} is expected already", operation="expect")
        self._num_expectations += 1
        counter.expectation_index = self._num_expectations
        counter.num_expected = num_writes
        counter.record_arrivals = record_arrivals
        return self._num_expectations, self._landed(immediate, counter)

    def expire(self, immediate: Immediate, expectation_index: int) -> ExpectationExpired | None:
        """The end of that expectation, unless it ended before."""
        counter = self._counters.get(immediate)
        if counter is None or counter.num_expected is None or counter.expectation_index != expectation_index:
            return None
        num_expected, counter.num_expected = counter.num_expected, None
        return ExpectationExpired(immediate=immediate, num_arrived=len(counter.arrivals_ns), num_expected=num_expected)

    def forget(self, immediate: Immediate) -> None:
        """Close the generation of the immediate, and with it all before."""
        self._counters.pop(immediate, None)
        if not self._is_closed(immediate):
            self._closed_generations[immediate >> IMMEDIATE_GENERATION_BITS] = immediate % NUM_GENERATIONS

    def _is_closed(self, immediate: Immediate) -> bool:
        closed = self._closed_generations.get(immediate >> IMMEDIATE_GENERATION_BITS)
        if closed is None:
            return False
        return (closed - immediate % NUM_GENERATIONS) % NUM_GENERATIONS < NUM_GENERATIONS // 2

    def _landed(self, immediate: Immediate, counter: _Counter) -> Landed | None:
        if counter.num_expected is None or len(counter.arrivals_ns) < counter.num_expected:
            return None
        counter.num_expected = None
        return Landed(
            immediate=immediate,
            num_writes=len(counter.arrivals_ns),
            first_ns=counter.arrivals_ns[0],
            last_ns=counter.arrivals_ns[-1],
            arrivals_ns=tuple(counter.arrivals_ns) if counter.record_arrivals else (),
        )
