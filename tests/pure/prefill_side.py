"""The prefill role of one worker, with its sender and scheduler, on a scripted fabric; the test runs the passes."""

from dataclasses import dataclass, field
from itertools import count

from tests.pure.scripted_fabric import REGION_BYTES, ScriptedFabric

from pdserve.fabric.port import FlushId, PagePush, PushId, PushOutcome, RegionDescriptor, RegionId, RegionSlice
from pdserve.ids import HandoffId, Immediate, Incarnation, RequestId, SequenceId, TailSlot, WorkerId
from pdserve.kv.layout import KvLayout
from pdserve.kv.pages import PagePool
from pdserve.kv.shard import KvSharding
from pdserve.prefill.role import PrefillRole
from pdserve.schedule.batch import Batch, BatchResult
from pdserve.schedule.limits import ScheduleLimits
from pdserve.schedule.scheduler import Scheduler
from pdserve.transfer.sender import Sender
from pdserve.transfer.source import DraftSource, Source
from pdserve.wire.peer import PROTOCOL_VERSION, Cancel, Grant, Message, PeerHello, RankRegions

LAYOUT = KvLayout(num_layers=2, num_kv_heads=2, head_dim=2, page_slots=4, dtype="float32")
ONE_RANK = KvSharding(layout=LAYOUT)
TAIL_BYTES = 64
CHUNK_TOKENS = 6
DRAFT_REGION = RegionId(99)
DECODE = Incarnation(1)
"""The peer that is connected from the start."""
PREFILL = Incarnation(2)


def region(key: int, *, num_bytes: int = REGION_BYTES) -> RegionDescriptor:
    whole = RegionSlice(start=0, num_bytes=num_bytes, base=0, keys=(key,))
    return RegionDescriptor(num_bytes=num_bytes, nics=(0,), slices=(whole,))


def hello_of(
    incarnation: Incarnation,
    *,
    sharding: KvSharding = ONE_RANK,
    draft_layout: KvLayout | None = None,
    num_dp_ranks: int = 1,
) -> PeerHello:
    """A decode worker's."""
    keys = count(100 * incarnation)
    return PeerHello(
        protocol_version=PROTOCOL_VERSION,
        worker_id=WorkerId(f"decode-{incarnation}"),
        incarnation=incarnation,
        model_fingerprint="toy",
        sharding=sharding,
        draft_layout=draft_layout,
        num_pages=32,
        tail_slot_bytes=TAIL_BYTES,
        heartbeat_s=1.0,
        lease_s=3.0,
        fabric_provider="scripted",
        fabric_address=b"",
        regions=tuple(
            RankRegions(
                kv=tuple(region(next(keys)) for _ in range(sharding.num_ranks)),
                draft_kv=None if draft_layout is None else region(next(keys)),
                tail=region(next(keys)),
            )
            for _ in range(num_dp_ranks)
        ),
    )


@dataclass(slots=True)
class PrefillSide:
    num_pages: int = 16
    num_tail_slots: int = 4
    max_waiting: int = 8
    sharding: KvSharding = ONE_RANK
    draft_layout: KvLayout | None = None
    fabric: ScriptedFabric = field(default_factory=ScriptedFabric)
    sent: list[tuple[Incarnation, Message]] = field(default_factory=list[tuple[Incarnation, Message]])
    dropped: list[Incarnation] = field(default_factory=list[Incarnation])
    now_ns: int = 0
    pool: PagePool = field(init=False)
    sender: Sender = field(init=False)
    role: PrefillRole = field(init=False)
    scheduler: Scheduler = field(init=False)
    running: Batch | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.pool = PagePool(num_pages=self.num_pages)
        self.scheduler = Scheduler(
            pool=self.pool,
            page_slots=LAYOUT.page_slots,
            limits=ScheduleLimits(
                max_batch_tokens=CHUNK_TOKENS,
                saturation_tokens=CHUNK_TOKENS,
                max_running=CHUNK_TOKENS - 1,
                max_waiting=self.max_waiting,
            ),
        )
        self.sender = Sender(
            incarnation=PREFILL,
            source=Source(
                sharding=self.sharding,
                num_pages=self.num_pages,
                kv_regions=tuple(map(RegionId, range(self.sharding.num_ranks))),
                draft=None if self.draft_layout is None else DraftSource(layout=self.draft_layout, region=DRAFT_REGION),
                tail_region=RegionId(self.sharding.num_ranks),
                tail_slot_bytes=TAIL_BYTES,
            ),
            fabric=self.fabric,
            outbox=self,
            drop_peer=self._drop,
        )
        sequence_ids = count()
        self.role = PrefillRole(
            incarnation=PREFILL,
            sender=self.sender,
            scheduler=self.scheduler,
            pool=self.pool,
            num_tail_slots=self.num_tail_slots,
            outbox=self,
            new_sequence_id=lambda: SequenceId(next(sequence_ids)),
        )
        self.join(DECODE)

    def send(self, peer: Incarnation, message: Message) -> None:
        self.sent.append((peer, message))

    def _drop(self, peer: Incarnation, why: str) -> None:
        assert why
        self.dropped.append(peer)

    def join(self, peer: Incarnation, *, sharding: KvSharding = ONE_RANK, num_dp_ranks: int = 1) -> None:
        """`sharding` is the peer's."""
        self.sender.peer_joined(
            hello_of(peer, sharding=sharding, draft_layout=self.draft_layout, num_dp_ranks=num_dp_ranks)
        )

    def grant(
        self,
        handoff_id: int = 1,
        *,
        num_tokens: int = 12,
        num_held_tokens: int = 0,
        peer: Incarnation = DECODE,
        dp_rank: int = 0,
    ) -> Grant:
        num_pages = LAYOUT.num_pages_for(num_tokens - 1) - num_held_tokens // LAYOUT.page_slots
        return Grant(
            sender=peer,
            receiver=PREFILL,
            handoff_id=HandoffId(handoff_id),
            request_id=RequestId(f"request-{handoff_id}"),
            dp_rank=dp_rank,
            token_ids=tuple(range(num_tokens)),
            num_held_tokens=num_held_tokens,
            page_indices=tuple(range(20, 20 + num_pages)),
            immediate=Immediate(handoff_id << 12),
            tail_slot=TailSlot(3),
            timeout_s=30.0,
        )

    def granted(self, handoff_id: int = 1, *, num_tokens: int = 12, peer: Incarnation = DECODE) -> Grant:
        """A grant comes in."""
        grant = self.grant(handoff_id, num_tokens=num_tokens, peer=peer)
        self.role.on_grant(peer, grant, now_ns=self.now_ns)
        return grant

    def cancelled(self, grant: Grant) -> None:
        """A cancel comes in."""
        message = Cancel(sender=grant.sender, receiver=grant.receiver, handoff_id=grant.handoff_id)
        self.role.on_cancel(grant.sender, message, now_ns=self.now_ns)

    def lose(self, peer: Incarnation = DECODE) -> None:
        self.role.peer_lost(peer, now_ns=self.now_ns)

    def start_pass(self) -> Batch:
        batch = self.scheduler.next_batch(self.now_ns)
        assert batch is not None
        self.running = batch
        self.role.before_pass(batch, now_ns=self.now_ns)
        return batch

    def end_pass(self) -> None:
        batch = self.running
        assert batch is not None
        self.running = None
        result = BatchResult(pass_index=batch.pass_index, sampled=(), started_ns=0, ended_ns=0)
        outcome = self.scheduler.complete(result)
        self.role.after_pass(batch, result, outcome, now_ns=self.now_ns)

    def run_pass(self) -> None:
        self.start_pass()
        self.end_pass()

    def push_ends(self, push_id: PushId, outcome: PushOutcome = PushOutcome.DONE) -> None:
        event = self.fabric.push_ends(push_id, outcome, errno=0 if outcome is PushOutcome.DONE else 5)
        self.role.on_fabric_event(event, now_ns=self.now_ns)

    def all_pushes_end(self, outcome: PushOutcome = PushOutcome.DONE) -> None:
        for push_id in list(self.fabric.armed):
            self.push_ends(push_id, outcome)

    def flush_ends(self, *, delivered: bool = True) -> None:
        """The only flush ends."""
        (flush_id,) = self.fabric.flushes
        self.role.on_fabric_event(self.fabric.flush_ends(FlushId(flush_id), delivered=delivered), now_ns=self.now_ns)

    def armed_pages(self) -> list[PagePush]:
        return [push for push in self.fabric.armed.values() if isinstance(push, PagePush)]

    def is_whole(self) -> bool:
        """Nothing is out: no handoff, no page, no tail slot, nothing scheduled."""
        return (
            self.role.num_open == self.sender.num_open == 0
            and self.pool.num_free == self.num_pages
            and self.scheduler.num_running == self.scheduler.num_waiting == 0
        )
