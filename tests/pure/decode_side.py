"""The receiver of one decode worker on a scripted fabric, with what it sent and whom it dropped."""

from dataclasses import dataclass, field

from tests.pure.scripted_fabric import ScriptedFabric

from pdserve.fabric.port import Fenced, RegionDescriptor, RegionId
from pdserve.ids import HandoffId, Incarnation, RequestId, WorkerId
from pdserve.kv.layout import KvLayout
from pdserve.kv.pages import PagePool
from pdserve.transfer.receiver import Receiver, ReceiverLimits
from pdserve.wire.peer import Cancel, Grant, GrantRefused, HandoffStopped, Message

LAYOUT = KvLayout(num_layers=2, num_kv_heads=1, head_dim=2, page_slots=4, dtype="float32")
DECODE = Incarnation(1)
PREFILL = Incarnation(2)
"""The peer that is connected from the start."""


@dataclass(slots=True)
class DecodeSide:
    num_pages: int = 16
    num_tail_slots: int = 4
    limits: ReceiverLimits = field(default_factory=ReceiverLimits)
    fabric: ScriptedFabric = field(default_factory=ScriptedFabric)
    sent: list[tuple[Incarnation, Message]] = field(default_factory=list[tuple[Incarnation, Message]])
    dropped: list[Incarnation] = field(default_factory=list[Incarnation])
    exposures: dict[Incarnation, tuple[RegionDescriptor, RegionDescriptor]] = field(
        default_factory=dict[Incarnation, tuple[RegionDescriptor, RegionDescriptor]]
    )
    pool: PagePool = field(init=False)
    receiver: Receiver = field(init=False)

    def __post_init__(self) -> None:
        self.pool = PagePool(num_pages=self.num_pages)
        self.receiver = Receiver(
            incarnation=DECODE,
            layout=LAYOUT,
            pool=self.pool,
            fabric=self.fabric,
            kv_region=RegionId(0),
            tail_region=RegionId(1),
            num_tail_slots=self.num_tail_slots,
            outbox=self,
            drop_peer=self._drop,
            limits=self.limits,
        )
        self.join(PREFILL)

    def send(self, peer: Incarnation, message: Message) -> None:
        self.sent.append((peer, message))

    def _drop(self, peer: Incarnation, why: str) -> None:
        assert why
        self.dropped.append(peer)

    def join(self, peer: Incarnation) -> None:
        self.exposures[peer] = self.receiver.expose()
        self.receiver.peer_joined(
            worker_id=WorkerId(f"prefill-{peer}"), incarnation=peer, exposures=self.exposures[peer]
        )

    def open(self, *, num_tokens: int = 8, peer: Incarnation = PREFILL, now_ns: int = 0) -> Grant:
        """Open a handoff; its grant, as sent."""
        handoff_id = self.receiver.open(
            request_id=RequestId(f"request-{self.receiver.num_open}"),
            token_ids=tuple(range(num_tokens)),
            peer=peer,
            now_ns=now_ns,
            timeout_s=30.0,
            traced=False,
        )
        to, grant = self.sent[-1]
        assert isinstance(grant, Grant)
        assert (to, grant.handoff_id) == (peer, handoff_id)
        return grant

    def cancel(self, handoff_id: HandoffId, *, now_ns: int = 0) -> None:
        self.receiver.cancel(handoff_id, now_ns=now_ns)

    def cancels(self) -> list[HandoffId]:
        return [message.handoff_id for _, message in self.sent if isinstance(message, Cancel)]

    def refused(self, grant: Grant, *, now_ns: int = 0) -> None:
        """The answer of the prefill side comes in."""
        message = GrantRefused(
            sender=grant.receiver,
            receiver=grant.sender,
            handoff_id=grant.handoff_id,
            message="too busy",
            retry_after_s=2.0,
        )
        self.receiver.on_message(grant.receiver, message, now_ns=now_ns)

    def stopped(self, grant: Grant, *, now_ns: int = 0) -> None:
        """The confirmation of the prefill side comes in."""
        message = HandoffStopped(
            sender=grant.receiver, receiver=grant.sender, handoff_id=grant.handoff_id, message="cancelled"
        )
        self.receiver.on_message(grant.receiver, message, now_ns=now_ns)

    def all_land(self, grant: Grant, *, now_ns: int = 0) -> None:
        self.receiver.on_fabric_event(self.fabric.all_land(grant.immediate), now_ns=now_ns)

    def expires(self, grant: Grant, *, num_arrived: int = 0, now_ns: int = 0) -> None:
        event = self.fabric.expires(grant.immediate, num_arrived=num_arrived)
        self.receiver.on_fabric_event(event, now_ns=now_ns)

    def is_fenced(self, peer: Incarnation) -> None:
        """The fabric reports both exposures of a peer fenced."""
        for exposure in self.exposures.pop(peer):
            self.receiver.on_fabric_event(Fenced(exposure=exposure), now_ns=0)

    def is_whole(self) -> bool:
        """Nothing is out: no handoff, no page."""
        return self.receiver.num_open == 0 and self.pool.num_free == self.num_pages
