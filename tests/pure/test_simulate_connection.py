"""Control connections of the world: in order, late, held back by partitions, and cut."""

import random

from pdserve.clock import VirtualClock
from pdserve.ids import Incarnation
from pdserve.simulate.agenda import Agenda
from pdserve.simulate.connection import ControlNetwork, End
from pdserve.simulate.journal import Journal
from pdserve.simulate.process import Process
from pdserve.units import NS_PER_S
from pdserve.wire.peer import Heartbeat, Message


class Talk:
    """A connection from `dialler` to `listener`, and what each heard."""

    def __init__(self) -> None:
        self.agenda = Agenda(VirtualClock())
        self.network = ControlNetwork(self.agenda, random.Random(1), Journal())
        self.dialler, self.listener = Process(self.agenda, "dialler"), Process(self.agenda, "listener")
        self.ends: list[End] = []
        self.heard: list[int] = []
        self.num_ends_heard = 0
        self.num_failed = 0
        self.network.listeners["listener"] = (self.listener, self._accept)
        self.network.dial(self.dialler, "listener", self.ends.append, self.fail)
        self.pass_time()

    def pass_time(self, duration_ns: int = NS_PER_S) -> None:
        stop_ns = self.agenda.now_ns + duration_ns
        while (next_ns := self.agenda.next_ns) is not None and next_ns <= stop_ns:
            self.agenda.clock.advance_ns(next_ns - self.agenda.now_ns)
            self.agenda.do_next()
        self.agenda.clock.advance_ns(stop_ns - self.agenda.now_ns)

    def say(self, *numbers: int) -> None:
        for number in numbers:
            self.ends[0].send(Heartbeat(sender=Incarnation(number), receiver=Incarnation(0)))

    def _accept(self, end: End) -> None:
        end.on_message = self._hear
        end.on_end = self._hear_end

    def _hear(self, message: Message) -> None:
        assert isinstance(message, Heartbeat)
        self.heard.append(message.sender)

    def _hear_end(self) -> None:
        self.num_ends_heard += 1

    def fail(self) -> None:
        self.num_failed += 1


def test_messages_of_one_direction_arrive_late_and_in_order() -> None:
    talk = Talk()
    talk.say(*range(20))
    assert talk.heard == []
    talk.pass_time()
    assert talk.heard == list(range(20))


def test_blocked_direction_holds_messages_back_until_it_opens() -> None:
    talk = Talk()
    talk.network.block("dialler", "listener")
    talk.say(1, 2)
    talk.pass_time()
    assert talk.heard == []
    talk.network.unblock("dialler", "listener")
    talk.say(3)
    talk.pass_time()
    assert talk.heard == [1, 2, 3]


def test_cut_connection_loses_only_the_last_messages_and_both_sides_hear_the_end() -> None:
    talk = Talk()
    talk.say(*range(20))
    talk.network.cut("dialler", "listener")
    talk.pass_time()
    assert talk.heard == list(range(len(talk.heard)))
    assert (talk.num_ends_heard, talk.ends[0].is_open) == (1, False)


def test_hung_process_hears_everything_when_it_wakes() -> None:
    talk = Talk()
    talk.listener.hang()
    talk.say(1, 2)
    talk.pass_time()
    assert talk.heard == []
    talk.listener.wake()
    assert talk.heard == [1, 2]


def test_dead_process_hears_nothing_and_can_not_be_dialled() -> None:
    talk = Talk()
    talk.say(1)
    talk.listener.kill()
    talk.network.dial(talk.dialler, "listener", talk.ends.append, talk.fail)
    talk.pass_time()
    assert (talk.heard, talk.num_failed) == ([], 1)
