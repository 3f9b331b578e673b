"""Places for connections: bounded, and who waits without a request makes room for who comes."""

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.wire.connection_places import ConnectionPlaces, Ending, Place, affordable_connections


@dataclass(slots=True)
class Hall:
    """Places, and what became of who had one."""

    max_connections: int
    endings: list[Ending] = field(default_factory=list[Ending])
    closed: list[int] = field(default_factory=list[int])
    places: ConnectionPlaces = field(init=False)

    def __post_init__(self) -> None:
        self.places = ConnectionPlaces(max_connections=self.max_connections, on_ended=self.endings.append)

    def take(self, number: int) -> Place | None:
        return self.places.take(self._close(number))

    def seat(self, number: int) -> Place:
        place = self.take(number)
        assert place is not None
        return place

    def _close(self, number: int) -> Callable[[], None]:
        return lambda: self.closed.append(number)


def test_one_connection_too_many_displaces_the_one_that_waits_longest() -> None:
    hall = Hall(2)
    for number in range(4):
        hall.seat(number)
    assert (hall.closed, hall.endings) == ([0, 1], [Ending.DISPLACED] * 2)
    assert hall.places.num_taken == 2


def test_connection_with_a_request_is_never_displaced_and_waits_anew_after_it() -> None:
    hall = Hall(2)
    first = hall.seat(0)
    hall.seat(1)
    with first.request():
        hall.seat(2)
        assert hall.closed == [1]
    hall.seat(3)
    assert hall.closed == [1, 2]


def test_connection_is_refused_when_all_have_a_request() -> None:
    hall = Hall(1)
    first = hall.seat(0)
    with first.request():
        assert hall.take(1) is None
    assert (hall.closed, hall.endings) == ([], [Ending.FULL])
    assert hall.take(2) is not None


def test_place_left_while_its_request_runs_is_free_once() -> None:
    hall = Hall(1)
    first = hall.seat(0)
    with first.request():
        first.leave()
        hall.seat(1)
    first.leave()
    assert (hall.places.num_taken, hall.closed) == (1, [])
    hall.seat(2)
    assert hall.closed == [1]


@pytest.mark.parametrize("overdue", [False, True])
def test_overdue_connection_is_closed_unless_it_ever_had_a_request(overdue: bool) -> None:
    hall = Hall(1)
    place = hall.seat(0)
    if not overdue:
        with place.request():
            pass
    place.head_is_due()
    assert hall.closed == ([0] if overdue else [])
    assert hall.endings == ([Ending.NO_REQUEST] if overdue else [])
    assert hall.places.num_taken == (0 if overdue else 1)


@given(st.lists(st.tuples(st.sampled_from(["take", "begin", "end", "leave"]), st.integers(0, 5)), max_size=60))
def test_places_agree_with_a_list_of_who_waits_and_a_set_of_who_works(steps: list[tuple[str, int]]) -> None:
    """`number` names the connection among those that are there."""
    hall = Hall(3)
    places: dict[int, Place] = {}
    requests: dict[int, Callable[[], object]] = {}
    waiting: list[int] = []
    closed: list[int] = []
    for made, (step, number) in enumerate(steps):
        there = waiting + list(requests)
        chosen = there[number % len(there)] if there else None
        if step == "take":
            place = hall.take(made)
            assert (place is None) == (len(requests) == 3)
            if place is not None:
                places[made] = place
                if len(there) == 3:
                    closed.append(waiting.pop(0))
                waiting.append(made)
        elif chosen is None:
            continue
        elif step == "begin" and chosen in waiting:
            request = places[chosen].request()
            request.__enter__()
            waiting.remove(chosen)
            requests[chosen] = lambda request=request: request.__exit__(None, None, None)
        elif step == "end" and chosen in requests:
            requests.pop(chosen)()
            waiting.append(chosen)
        elif step == "leave":
            places[chosen].leave()
            if chosen in waiting:
                waiting.remove(chosen)
            else:
                requests.pop(chosen)()
        assert hall.places.num_taken == len(waiting) + len(requests)
        assert hall.closed == closed


@pytest.mark.parametrize(
    ("soft", "hard", "expected"),
    [
        (20_000, 20_000, (20_000, 2048)),
        (1024, 500_000, (4096, 2048)),
        (1024, -1, (4096, 2048)),
        (-1, -1, (-1, 2048)),
        (1024, 1024, (1024, 512)),
        (256, 1024, (1024, 512)),
    ],
)
def test_connections_have_half_of_the_descriptors_and_the_limit_is_raised_for_them(
    soft: int, hard: int, expected: tuple[int, int]
) -> None:
    assert affordable_connections(2048, soft=soft, hard=hard) == expected
