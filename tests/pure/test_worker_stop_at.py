"""A worker that stops itself at a state of a handoff: which states there are, and that it stops once for each."""

import pytest
from tests.pure.prefill_side import ONE_RANK, hello_of
from tests.pure.worker_side import WorkerSide

from pdserve.config.role import Role
from pdserve.errors import ConfigError
from pdserve.ids import Incarnation, RequestId
from pdserve.worker.stop_at import StopAt


class Stops:
    """Of one worker, counted instead of done."""

    def __init__(self, side: WorkerSide) -> None:
        self.count = 0
        self.stop_at = StopAt(side.core, stop=self._stop)

    def look(self) -> int:
        self.stop_at.look()
        return self.count

    def _stop(self) -> None:
        self.count += 1


def test_unarmed_worker_never_stops() -> None:
    side = WorkerSide()
    stops = Stops(side)
    side.generate("request", dp_rank=0)
    assert stops.look() == 0


def test_armed_worker_stops_once_when_a_handoff_enters_the_state() -> None:
    side = WorkerSide()
    stops = Stops(side)
    side.generate("first", dp_rank=0)
    stops.stop_at.arm("granted")
    assert stops.look() == 0  # what was in the state before does not count
    side.generate("second", dp_rank=1)
    assert stops.look() == 1
    side.generate("third", dp_rank=1)
    assert stops.look() == 1


def test_armed_worker_waits_for_its_state_through_others() -> None:
    side = WorkerSide()
    stops = Stops(side)
    stops.stop_at.arm("cancelling")
    side.generate("request", dp_rank=0)
    assert stops.look() == 0
    side.core.on_abort(RequestId("request"), now_ns=0)
    assert stops.look() == 1


def test_disarmed_worker_goes_on() -> None:
    side = WorkerSide()
    stops = Stops(side)
    stops.stop_at.arm("granted")
    stops.stop_at.disarm()
    side.generate("request", dp_rank=0)
    assert stops.look() == 0


def test_closed_is_entered_when_an_open_handoff_is_gone() -> None:
    side = WorkerSide()
    stops = Stops(side)
    stops.stop_at.arm("closed")
    side.generate("request", dp_rank=0)
    assert stops.look() == 0
    side.lands(side.grants()[0])
    assert stops.look() == 1


@pytest.mark.parametrize(
    ("role", "name", "states"),
    [
        (Role.DECODE, "pushing", "granted, cancelling, quarantined, closed"),
        (Role.PREFILL, "granted", "queued, pushing, sealed, stopping, flushing, abandoned, closed"),
    ],
)
def test_state_of_the_other_side_is_refused_with_the_states_there_are(role: Role, name: str, states: str) -> None:
    side = WorkerSide(role=role, num_dp_ranks=1)
    if side.core.sender is not None:
        side.core.sender.peer_joined(hello_of(Incarnation(7), sharding=ONE_RANK))
    with pytest.raises(ConfigError, match=f"'{name}' is no state .* its states are {states}$"):
        StopAt(side.core).arm(name)
