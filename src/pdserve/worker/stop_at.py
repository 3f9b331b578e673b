"""For tests of faults alone: a worker that stops itself the moment a handoff enters a chosen state.

Then others can kill it, kill its peer, or let it go on, and know where things stood. Without `--allow-stop-at` a worker
has no such object.
"""

import asyncio
import os
import signal
from collections.abc import Callable, Hashable, Mapping

from pdserve.errors import ConfigError
from pdserve.transfer.handoff import ReceiverState, SenderState
from pdserve.worker.core import WorkerCore

State = SenderState | ReceiverState


def stop_soon() -> None:
    """SIGSTOP to this process, one turn of the event loop later: what was just sent is on its way then."""
    asyncio.get_running_loop().call_soon(os.kill, os.getpid(), signal.SIGSTOP)


class StopAt:
    """Threads: the event loop's only. Stops once for each `arm`."""

    def __init__(self, core: WorkerCore, *, stop: Callable[[], None] = stop_soon) -> None:
        self._core = core
        self._stop = stop
        self._states: type[State] = ReceiverState if core.sender is None else SenderState
        self._wanted: State | None = None
        self._seen: Mapping[Hashable, State] = {}

    def arm(self, name: str) -> None:
        """Stop when a handoff next enters the state of this name on our side. Closed: when one that was open is gone.

        Raises: `ConfigError` when our side has no such state.
        """
        names = [state.value for state in self._states]
        if name not in names:
            raise ConfigError(f"{name!r} is no state of a handoff on this side; its states are {', '.join(names)}")
        self._wanted = self._states(name)
        self._seen = self._open()

    def disarm(self) -> None:
        self._wanted = None

    def look(self) -> None:
        """Call after each event of the core."""
        if self._wanted is None:
            return
        before, self._seen = self._seen, self._open()
        entered = {state for key, state in self._seen.items() if before.get(key) is not state}
        if before.keys() - self._seen.keys():
            entered.add(self._states("closed"))
        if self._wanted in entered:
            self._wanted = None
            self._stop()

    def _open(self) -> dict[Hashable, State]:
        """Each handoff that is not closed, and its state."""
        sender, receiver = self._core.sender, self._core.receiver
        states: dict[Hashable, State] = {}
        if sender is not None:
            states |= {handoff.key: handoff.state for handoff in sender.handoffs}
        if receiver is not None:
            states |= {handoff.handoff_id: handoff.state for handoff in receiver.handoffs}
        return states
