"""The receiver of one decode worker on a scripted fabric, with what it sent and whom it dropped."""

from dataclasses import dataclass, field
from itertools import count

from tests.pure.scripted_fabric import ScriptedFabric

from pdserve.fabric.port import Fenced, RegionDescriptor, RegionId
from pdserve.ids import HandoffId, Incarnation, RequestId, WorkerId
from pdserve.kv.layout import KvLayout
from pdserve.kv.pages import PagePool
from pdserve.kv.shard import KvSharding
from pdserve.transfer.destination import Destination, exposures_of
from pdserve.transfer.limits import ReceiverLimits
from pdserve.transfer.receiver import Receiver
from pdserve.wire.peer import Cancel, Grant, GrantRefused, HandoffStopped, Message, RankRegions

LAYOUT = KvLayout(num_layers=2, num_kv_heads=2, head_dim=2, page_slots=4, dtype="float32")
ONE_RANK = KvSharding(layout=LAYOUT)
DECODE = Incarnation(1)
PREFILL = Incarnation(2)
"""The peer that is connected from the start."""


@dataclass(slots=True)
class DecodeSide:
    num_pages: int = 16
    num_tail_slots: int = 4
    """Pages and tail slots are of each data parallel rank."""
    num_dp_ranks: int = 1
    sharding: KvSharding = ONE_RANK
    draft_layout: KvLayout | None = None
    limits: ReceiverLimits = field(default_factory=ReceiverLimits)
    fabric: ScriptedFabric = field(default_factory=ScriptedFabric)
    sent: list[tuple[Incarnation, Message]] = field(default_factory=list[tuple[Incarnation, Message]])
    dropped: list[Incarnation] = field(default_factory=list[Incarnation])
    regions: dict[Incarnation, tuple[RankRegions, ...]] = field(
        default_factory=dict[Incarnation, tuple[RankRegions, ...]]
    )
    """What each peer that is not fenced was given keys for."""
    pools: list[PagePool] = field(init=False)
    receiver: Receiver = field(init=False)

    def __post_init__(self) -> None:
        self.pools = [PagePool(num_pages=self.num_pages) for _ in range(self.num_dp_ranks)]
        region_ids = map(RegionId, count())
        self.receiver = Receiver(
            incarnation=DECODE,
            sharding=self.sharding,
            draft_layout=self.draft_layout,
            destinations=[
                Destination(
                    pool=pool,
                    kv_regions=tuple(next(region_ids) for _ in range(self.sharding.num_ranks)),
                    draft_kv_region=None if self.draft_layout is None else next(region_ids),
                    tail_region=next(region_ids),
                    num_tail_slots=self.num_tail_slots,
                )
                for pool in self.pools
            ],
            fabric=self.fabric,
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

    @property
    def pool(self) -> PagePool:
        """Of the first data parallel rank."""
        return self.pools[0]

    def join(self, peer: Incarnation, sharding: KvSharding = ONE_RANK) -> None:
        """`sharding` is the peer's."""
        regions = self.receiver.expose()
        self.receiver.peer_joined(
            worker_id=WorkerId(f"prefill-{peer}"), incarnation=peer, sharding=sharding, regions=regions
        )
        self.regions[peer] = regions

    def exposures(self, peer: Incarnation) -> list[RegionDescriptor]:
        return exposures_of(self.regions[peer])

    def open(self, *, num_tokens: int = 8, peer: Incarnation = PREFILL, dp_rank: int = 0, now_ns: int = 0) -> Grant:
        """Open a handoff; its grant, as sent."""
        handoff_id = self.receiver.open(
            request_id=RequestId(f"request-{self.receiver.num_open}"),
            token_ids=tuple(range(num_tokens)),
            peer=peer,
            dp_rank=dp_rank,
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
        """The fabric reports all exposures of a peer fenced."""
        for exposure in exposures_of(self.regions.pop(peer)):
            self.receiver.on_fabric_event(Fenced(exposure=exposure), now_ns=0)

    def is_whole(self) -> bool:
        """Nothing is out: no handoff, no page, no tail slot."""
        num_slots_free = [destination._tail_slots.num_free for destination in self.receiver._destinations]  # pyright: ignore[reportPrivateUsage]
        return (
            self.receiver.num_open == 0
            and all(pool.num_free == self.num_pages for pool in self.pools)
            and all(num_free == self.num_tail_slots for num_free in num_slots_free)
        )
