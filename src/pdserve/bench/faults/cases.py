"""The table of faults: who is struck, how, and at which moment of a handoff."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from pdserve.config.role import Role
from pdserve.transfer.handoff import ReceiverState, SenderState


class Victim(Enum):
    PREFILL = "prefill"
    DECODE = "decode"
    GATEWAY = "gateway"


class Fault(Enum):
    KILL = "kill"
    """SIGKILL; a successor is started when the answers have ended."""
    RESTART = "restart"
    """SIGKILL, and a successor at the same address at once."""
    PAUSE = "pause"
    """SIGSTOP and SIGCONT within the lease: nobody may notice."""
    HANG = "hang"
    """SIGSTOP, and SIGCONT after the lease has run out: the others count it as dead, then it wakes."""
    CUT = "cut"
    """Its network link is down until the lease has run out."""
    BLINK = "blink"
    """Its network link is down for less than the lease."""


FAULTS_OF_PROCESSES = (Fault.KILL, Fault.RESTART, Fault.PAUSE, Fault.HANG)
FAULTS_OF_LINKS = (Fault.CUT, Fault.BLINK)


class Provocation(Enum):
    """What leads to states that an undisturbed request does not pass."""

    NOTHING = "nothing"
    LEAVE = "leave"
    """The client hangs up while its prompt is pushed."""
    LOSE_DECODE = "lose decode"
    """The decode worker is killed while a prompt is pushed to it."""
    LOSE_PREFILL = "lose prefill"
    """The prefill worker is killed while it pushes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """Where things stand when the fault happens."""

    name: str
    stops: Role | None
    """Whose handoff state it is: a worker of this role stops itself there. None: once the subject has streamed."""
    state: str = ""
    provocation: Provocation = Provocation.NOTHING


def _sender(state: SenderState, provocation: Provocation = Provocation.NOTHING) -> Moment:
    return Moment(name=state.value, stops=Role.PREFILL, state=state.value, provocation=provocation)


def _receiver(state: ReceiverState, provocation: Provocation = Provocation.NOTHING, *, name: str = "") -> Moment:
    return Moment(name=name or state.value, stops=Role.DECODE, state=state.value, provocation=provocation)


QUEUED = _sender(SenderState.QUEUED)
PUSHING = _sender(SenderState.PUSHING)
SEALED = _sender(SenderState.SEALED)
PUSHED = Moment(name="pushed", stops=Role.PREFILL, state=SenderState.CLOSED.value)
STOPPING = _sender(SenderState.STOPPING, Provocation.LEAVE)
FLUSHING = _sender(SenderState.FLUSHING, Provocation.LEAVE)
ABANDONED = _sender(SenderState.ABANDONED, Provocation.LOSE_DECODE)
GRANTED = _receiver(ReceiverState.GRANTED)
LANDED = _receiver(ReceiverState.CLOSED, name="landed")
CANCELLING = _receiver(ReceiverState.CANCELLING, Provocation.LEAVE)
QUARANTINED = _receiver(ReceiverState.QUARANTINED, Provocation.LOSE_PREFILL)
STREAMING = Moment(name="streaming", stops=None)

MOMENTS = (
    *(GRANTED, QUEUED, PUSHING, SEALED, PUSHED, LANDED, STREAMING),
    *(CANCELLING, STOPPING, FLUSHING, ABANDONED, QUARANTINED),
)
"""Every state of both tables; CLOSED is `pushed` on the prefill side, `landed` on the decode side."""


class Promise(Enum):
    """What the product promises of each answer, the subject's and the bystanders'."""

    SAME = "the undisturbed answer"
    SAME_OR_LOST = "the undisturbed answer, or `worker_lost`"
    SAME_OR_BROKEN = "the undisturbed answer, or a broken connection"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    victim: Victim
    fault: Fault
    moment: Moment
    is_last: bool = False
    """The other worker of the victim's role was killed before."""

    @property
    def name(self) -> str:
        last = "last-" if self.is_last else ""
        return f"{last}{self.victim.value}-{self.fault.value}-{self.moment.name}"

    @property
    def promise(self) -> Promise:
        if self.victim is Victim.GATEWAY:
            match self.fault:
                case Fault.KILL | Fault.RESTART:
                    return Promise.SAME_OR_BROKEN
                case Fault.HANG | Fault.CUT:
                    # Its workers take it for dead and give its requests up; when it wakes, it finds them gone.
                    return Promise.SAME_OR_LOST
                case Fault.PAUSE | Fault.BLINK:
                    return Promise.SAME
        return Promise.SAME_OR_LOST if self.is_last and self.victim is Victim.DECODE else Promise.SAME


def process_cases() -> tuple[Case, ...]:
    """Every fault of a process, for every kind of process, at every moment; and of the last worker of its role."""
    return (*_of_every_moment(), *_of_the_last())


def link_cases() -> tuple[Case, ...]:
    """A worker's link cut for longer and for less than the lease, at the moments that an undisturbed request passes."""
    return tuple(
        Case(victim=victim, fault=fault, moment=moment)
        for victim, moments in (
            (Victim.PREFILL, (GRANTED, QUEUED, PUSHING, SEALED, FLUSHING)),
            (Victim.DECODE, (GRANTED, PUSHING, SEALED, LANDED, STREAMING, CANCELLING)),
        )
        for moment in moments
        for fault in FAULTS_OF_LINKS
    )


def _of_every_moment() -> Iterator[Case]:
    for moment in MOMENTS:
        for victim in Victim:
            for fault in FAULTS_OF_PROCESSES:
                if not _is_dead(victim, moment) or fault is Fault.RESTART:
                    yield Case(victim=victim, fault=fault, moment=moment)


def _of_the_last() -> Iterator[Case]:
    for moment in (GRANTED, PUSHING, STREAMING):
        yield Case(victim=Victim.DECODE, fault=Fault.KILL, moment=moment, is_last=True)
    for fault in (Fault.KILL, Fault.RESTART):
        yield Case(victim=Victim.PREFILL, fault=fault, moment=PUSHING, is_last=True)


def _is_dead(victim: Victim, moment: Moment) -> bool:
    """Whether the moment came about by the victim's death, so that it can only be started again."""
    provocation = moment.provocation
    return (victim is Victim.DECODE and provocation is Provocation.LOSE_DECODE) or (
        victim is Victim.PREFILL and provocation is Provocation.LOSE_PREFILL
    )
