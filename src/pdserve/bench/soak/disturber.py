"""Carries out faults on real processes, one at a time, and sees that all recover from each."""

import asyncio
from collections import Counter
from collections.abc import Iterator

from pdserve.bench.faults.fleet import Fleet
from pdserve.bench.soak.fault_plan import Fault, FaultKind
from pdserve.bench.waiting import is_set_within
from pdserve.errors import ConfigError

DRAIN_TIMEOUT_S = 30.0
DRAIN_GRACE_S = 15.0
"""For what comes after the drain, on a busy machine."""

RECOVERY_TIMEOUT_S = 60.0


class Disturber:
    """Threads: the event loop's only."""

    def __init__(self, fleet: Fleet, faults: Iterator[Fault]) -> None:
        self._fleet = fleet
        self._faults = faults
        self.counts: Counter[FaultKind] = Counter()
        self.problems: list[str] = []
        """Who did not end or come back as it should."""

    async def run(self, until: asyncio.Event) -> None:
        """Faults until the event; one that is under way is finished, so that all are there and connected at the end."""
        while True:
            fault = next(self._faults)
            if await is_set_within(until, fault.after_s):
                return
            await self._carry_out(fault)
            await self._recover(fault)

    async def _carry_out(self, fault: Fault) -> None:
        self.counts[fault.kind] += 1
        match fault.kind:
            case FaultKind.KILL:
                await self._fleet.kill(fault.target)
                await asyncio.sleep(fault.lasts_s)
                await self._start(fault.target)
            case FaultKind.DRAIN:
                status = await self._fleet.stop(fault.target, timeout_s=DRAIN_TIMEOUT_S + DRAIN_GRACE_S)
                if status != 0:
                    self.problems.append(f"{fault.target} ended with {status}, not 0, when it was asked to")
                await self._start(fault.target)
            case FaultKind.FREEZE | FaultKind.LONG_FREEZE:
                self._fleet.freeze(fault.target)
                try:
                    await asyncio.sleep(fault.lasts_s)
                finally:
                    self._fleet.thaw(fault.target)

    async def _recover(self, fault: Fault) -> None:
        for name in self._fleet.names:
            if not self._fleet.is_running(name):
                self.problems.append(f"{name} did not run after {fault.kind.value} of {fault.target}")
                await self._start(name)
        try:
            await self._fleet.until_connected(timeout_s=RECOVERY_TIMEOUT_S)
        except TimeoutError:
            self.problems.append(
                f"not all were connected again {RECOVERY_TIMEOUT_S:g} s after {fault.kind.value} of {fault.target}"
            )

    async def _start(self, name: str) -> None:
        try:
            await self._fleet.start(name)
        except ConfigError as error:
            self.problems.append(error.message)
