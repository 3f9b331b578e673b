"""Carries the faults of a plan out, and ends them."""

from collections.abc import Callable
from typing import TYPE_CHECKING, assert_never

from pdserve.ids import Incarnation
from pdserve.simulate.gateway import Gateway
from pdserve.simulate.gateway_end import GATEWAY
from pdserve.simulate.plan import Fault, FaultKind
from pdserve.simulate.referee import RuleBroken
from pdserve.units import NS_PER_MS, NS_PER_S
from pdserve.wire.cluster import Abort, Failed, Generate, Generated
from pdserve.wire.peer import Cancel, Grant, GrantRefused, HandoffStopped, Message

if TYPE_CHECKING:
    from pdserve.simulate.worker import Worker
    from pdserve.simulate.world import World

SLOW_CONTROL_NS = 300 * NS_PER_MS
SLOWNESS = 100
"""Of writes; the slowest of the usual take 20 ms."""

WRITE_FAILURE_PROBABILITY = 0.2
MAX_ARMABLE = 6
MAX_STALE = 8
"""Messages that arrive again at a time."""

DRAIN_NS = 5 * NS_PER_S
"""The drain timeout of a process that is told twice to stop."""

STALE_AFTER_NS = 20 * NS_PER_MS
"""By then a successor has usually joined the gateway and met its peers."""


class Breakage:
    def __init__(self, world: "World") -> None:
        self._world = world
        self._usual_delay_ns = world.control.max_delay_ns

    def begin(self, fault: Fault) -> None:
        world = self._world
        world.audit()
        world.journal.note("fault", f"{fault}", is_fault=True)
        target = world.process(fault.target)
        match fault.kind:
            case FaultKind.KILL:
                self._kill(target, fault)
            case FaultKind.TERM:
                target.do(lambda: target.drain(fault.duration_ns))
            case FaultKind.TERM_TWICE:
                target.do(lambda: target.drain(DRAIN_NS))
                self._later(fault, lambda: target.do(lambda: world.exit_at_once(target)))
            case FaultKind.HANG:
                if target.runs:
                    target.hang()
                    self._later(fault, target.wake)
            case FaultKind.PARTITION:
                self._block(fault, fault.target, fault.other)
                self._block(fault, fault.other, fault.target)
                self._slow_writes(fault)
            case FaultKind.DEAF:
                self._block(fault, fault.other, fault.target)
            case FaultKind.CUT:
                world.control.cut(fault.target, fault.other)
            case FaultKind.SLOW:
                world.control.max_delay_ns = SLOW_CONTROL_NS
                self._later(fault, self._usual_control)
                self._slow_writes(fault)
            case FaultKind.WRITE_ERRORS:
                self._set_writes(fault, slowness=1, failure_probability=WRITE_FAILURE_PROBABILITY)
            case FaultKind.SHORT:
                world.workers[fault.target].fabric.num_armable = world.draw.randint(0, MAX_ARMABLE)
            case FaultKind.STALE:
                self._send_stale()
            case FaultKind.JUMP:
                world.clock.advance_ns(fault.duration_ns)
            case _:
                assert_never(fault.kind)

    def _later(self, fault: Fault, end: Callable[[], None]) -> None:
        def say_and_end() -> None:
            self._world.journal.note("fault", f"over: {fault}", is_fault=True)
            end()

        self._world.agenda.after(fault.duration_ns, say_and_end)

    def _kill(self, target: "Worker | Gateway", fault: Fault) -> None:
        """Once a successor knows the others, it hears what the dead one was told, and they what that said."""
        if target.is_alive:
            self._world.kill(target)
            self._later(fault, lambda: self._world.succeed(target))
            self._world.agenda.after(fault.duration_ns + STALE_AFTER_NS, self._send_stale)

    def _block(self, fault: Fault, source: str, target: str) -> None:
        self._world.control.block(source, target)
        self._later(fault, lambda: self._world.control.unblock(source, target))

    def _usual_control(self) -> None:
        self._world.control.max_delay_ns = self._usual_delay_ns

    def _slow_writes(self, fault: Fault) -> None:
        self._set_writes(fault, slowness=SLOWNESS, failure_probability=0.0)

    def _set_writes(self, fault: Fault, *, slowness: int, failure_probability: float) -> None:
        world, timeline = self._world, self._world.fabrics.timeline
        timeline.faults = world.write_faults(slowness=slowness, failure_probability=failure_probability)

        def usual() -> None:
            timeline.faults = world.write_faults()

        self._later(fault, usual)

    def _send_stale(self) -> None:
        """What was said to a dead worker, or by one, comes over a connection of its successor (H4)."""
        past = [entry for entry in self._world.control.sent if self._is_stale(*entry)]
        for source, name, message in self._world.draw.sample(past, min(MAX_STALE, len(past))):
            self._world.journal.note(source, f"stale, to {name}:", message)
            self._hand_over(source, name, message)

    def _is_stale(self, source: str, name: str, message: Message) -> bool:
        """Whether either side is another incarnation now."""
        match message:
            case Grant() | Cancel() | GrantRefused() | HandoffStopped():
                return not self._is_current(source, message.sender) or not self._is_current(name, message.receiver)
            case Generate() | Abort():
                return not self._is_current(name, message.receiver)
            case Generated() | Failed():
                return not self._is_current(source, message.sender)
            case _:
                return False

    def _is_current(self, name: str, incarnation: Incarnation) -> bool:
        return self._world.workers[name].incarnation == incarnation

    def _hand_over(self, source: str, name: str, message: Message) -> None:
        """Raises: `RuleBroken` when it is not refused and counted."""
        gateway, workers = self._world.gateway, self._world.workers
        num_before = self._num_stale(name)
        if name == GATEWAY:
            member = gateway.members.get(workers[source].core.identity.worker_id)
            if member is None or member.incarnation != workers[source].incarnation:
                return
            gateway.on_message(member, message)
        elif not workers[name].runs:
            return
        elif source == GATEWAY:
            workers[name].gateway.on_message(message)
        else:
            link = workers[name].peers.links.get(workers[source].incarnation)
            if link is None:
                return
            workers[name].peers.on_message(link, message)
        if self._num_stale(name) == num_before:
            raise RuleBroken(f"H4: {name} did not refuse a stale {type(message).__name__} of {source}")

    def _num_stale(self, name: str) -> int:
        """Messages of other incarnations that were counted there."""
        if name == GATEWAY:
            return self._world.gateway.num_stale
        worker = self._world.workers[name]
        sides = (worker.core.sender, worker.core.receiver)
        return worker.gateway.num_stale + sum(side.num_stale_messages for side in sides if side is not None)
