"""One worker without engine, sockets and memory: the product's core, whose passes take as long as a model says."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from pdserve.config.role import Role
from pdserve.config.worker import WorkerSettings
from pdserve.engine.port import EngineInfo
from pdserve.errors import InternalError
from pdserve.fabric.port import FabricEvent
from pdserve.ids import Incarnation, RequestId, WorkerId
from pdserve.kv.shard import KvSharding
from pdserve.perfmodel.port import PerfModel
from pdserve.schedule.batch import Batch
from pdserve.simulate.agenda import Agenda
from pdserve.simulate.fleet.drafting import RankDrafter
from pdserve.simulate.fleet.fabric import FleetFabric
from pdserve.simulate.fleet.pass_times import PassTimes
from pdserve.simulate.fleet.passes import result_of, shape_of
from pdserve.simulate.fleet.plan import FleetPlan, PoolPlan
from pdserve.simulate.fleet.region import SizedRegion
from pdserve.simulate.fleet.silence import SILENCE
from pdserve.telemetry.instants import Instant
from pdserve.transfer.identity import Identity
from pdserve.units import seconds_to_ns
from pdserve.wire.cluster import Abort, Generate, Join, WorkerHeartbeat
from pdserve.wire.peer import (
    PROTOCOL_VERSION,
    Cancel,
    Grant,
    GrantRefused,
    HandoffStopped,
    Message,
    PeerHello,
)
from pdserve.worker.core import WorkerCore
from pdserve.worker.handshake import hello
from pdserve.worker.surroundings import EngineRegions, Surroundings

MODEL_NAME = "fleet"
MAX_MODEL_LEN = 1 << 20
"""What limits a request is the KV cache that it must fit."""

FLUSH_BYTES = 64
"""The spare end of each region, which flushes write to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetGround:
    """What the workers of a fleet share."""

    plan: FleetPlan
    agenda: Agenda
    fabrics: list[FleetFabric]
    workers: "dict[Incarnation, FleetWorker]"
    to_gateway: Callable[[WorkerId, Message], None]
    on_exposed: Callable[[RequestId, int], None]
    """How long after its prefill a request's KV had landed, ns."""


class FleetWorker:
    """Everything that happens to the core ends in `_happened`."""

    def __init__(self, ground: FleetGround, incarnation: Incarnation, role: Role, perf: PerfModel) -> None:
        self.role = role
        self.incarnation = incarnation
        self.worker_id = WorkerId(f"{role.value}-{incarnation:05}")
        self._ground = ground
        self._pool = ground.plan.pools[role]
        self._fabric = FleetFabric(
            ground.fabrics,
            ground.agenda,
            num_nics=self._pool.num_ranks,
            push_s=perf.push_s,
            on_event=self._on_fabric_event,
        )
        self.core = WorkerCore(self._surroundings(ground.plan, self._pool))
        self._batches: list[Batch | None] = [None] * self._pool.num_ranks
        self._busy_ns = [0] * self._pool.num_ranks
        self._drafters = self._make_drafters()
        self._pass_times = [PassTimes(ground.plan, perf, incarnation, rank) for rank in range(self._pool.num_ranks)]
        self._hello: PeerHello | None = None

    def busy_ns(self) -> int:
        """Of all ranks, up to the last passes that ended."""
        return sum(self._busy_ns)

    # What the gateway says

    def on_generate(self, generate: Generate) -> None:
        if generate.prefill is not None:
            self._meet(self._ground.workers[generate.prefill.incarnation])
        for refusal in self.core.on_generate(generate, now_ns=self._ground.agenda.now_ns):
            self._ground.to_gateway(self.worker_id, refusal)
        self._happened()

    def on_abort(self, abort: Abort) -> None:
        self.core.on_abort(abort.request_id, now_ns=self._ground.agenda.now_ns)
        self._happened()

    # What peers say

    def send(self, peer: Incarnation, message: Message) -> None:
        """The outbox of the core."""
        ground = self._ground
        ground.agenda.after(ground.plan.message_ns, partial(ground.workers[peer].on_peer, self.incarnation, message))

    def on_peer(self, peer: Incarnation, message: Message) -> None:
        now_ns = self._ground.agenda.now_ns
        prefill, receiver = self.core.prefill, self.core.receiver
        match message:
            case Grant() if prefill is not None:
                prefill.on_grant(peer, message, now_ns=now_ns)
            case Cancel() if prefill is not None:
                prefill.on_cancel(peer, message, now_ns=now_ns)
            case GrantRefused() | HandoffStopped() if receiver is not None:
                receiver.on_message(peer, message, now_ns=now_ns)
                self.core.advance(now_ns=now_ns)
            case _:
                pass
        self._happened()

    # Time

    def on_time(self) -> None:
        """Deadlines pass."""
        self._fabric.expire()
        self.core.on_time(self._ground.agenda.now_ns)
        self._happened()

    def join(self) -> Join:
        return Join(
            protocol_version=PROTOCOL_VERSION,
            worker_id=self.worker_id,
            incarnation=self.incarnation,
            role=self.role,
            url=self.worker_id,
            model_name=MODEL_NAME,
            model_fingerprint=MODEL_NAME,
            max_model_len=MAX_MODEL_LEN,
            lease_s=self._ground.plan.lease_s,
            tensor_parallel_size=1,
            loads=self.core.loads(),
        )

    def heartbeat(self) -> WorkerHeartbeat:
        return WorkerHeartbeat(
            sender=self.incarnation, loads=self.core.loads(), num_prefill_peers=self.core.num_prefill_peers
        )

    # Inside

    def _meet(self, prefill: "FleetWorker") -> None:
        """Shake hands with a prefill worker, if that was not done. In the product it was, when the second joined."""
        receiver, sender = self.core.receiver, prefill.core.sender
        if receiver is None or sender is None or receiver.is_connected(prefill.incarnation):
            return
        if self._hello is None:
            self._hello = self._make_hello()
        sender.peer_joined(self._hello)
        receiver.peer_joined(
            worker_id=prefill.worker_id,
            incarnation=prefill.incarnation,
            sharding=prefill.core.identity.sharding,
            regions=self._hello.regions,
        )

    def _make_drafters(self) -> list[RankDrafter | None]:
        """By data parallel rank."""
        drafting = self._ground.plan.drafting
        return [
            RankDrafter(drafting, self.incarnation, dp_rank) if drafting.num_drafts else None
            for dp_rank in range(self._pool.num_ranks)
        ]

    def _make_hello(self) -> PeerHello:
        receiver = self.core.receiver
        return hello(
            self.core.identity, self._settings, self._fabric, regions=receiver.expose() if receiver is not None else ()
        )

    def _surroundings(self, plan: FleetPlan, pool: PoolPlan) -> Surroundings:
        settings = self._settings = self._settings_of(plan, pool)
        num_pages = plan.layout.num_pages_for(pool.kv_tokens)
        engine = EngineInfo(
            sharding=KvSharding(layout=plan.layout),
            num_pages=num_pages,
            num_tail_slots=settings.num_tail_slots,
            tail_slot_bytes=plan.tail_bytes,
            max_model_len=MAX_MODEL_LEN,
            vocab_size=SILENCE.vocab_size,
            model_fingerprint=MODEL_NAME,
            pids=(),
        )
        identity = Identity(
            worker_id=self.worker_id,
            incarnation=self.incarnation,
            model_fingerprint=MODEL_NAME,
            sharding=engine.sharding,
            num_pages=num_pages,
            tail_slot_bytes=plan.tail_bytes,
        )
        return Surroundings(
            settings=settings,
            identity=identity,
            engine=engine,
            regions=tuple(self._register(engine, dp_rank) for dp_rank in range(pool.num_ranks)),
            tokenizer=SILENCE,
            fabric=self._fabric,
            outbox=self,
            drop_peer=_drop_peer,
        )

    def _settings_of(self, plan: FleetPlan, pool: PoolPlan) -> WorkerSettings:
        return WorkerSettings(
            name=self.worker_id,
            role=self.role,
            join_url="",
            model_dir="",
            model_name=MODEL_NAME,
            page_slots=plan.layout.page_slots,
            kv_tokens=pool.kv_tokens,
            chunk_tokens=pool.chunk_tokens,
            saturation_tokens=min(pool.saturation_tokens, pool.chunk_tokens),
            max_running=pool.max_running,
            max_waiting=pool.max_waiting,
            data_parallel_size=pool.num_ranks,
            lease_s=plan.lease_s,
            heartbeat_s=plan.heartbeat_s,
            speculation=plan.drafting.speculation,
        )

    def _register(self, engine: EngineInfo, dp_rank: int) -> EngineRegions:
        kv_bytes = engine.sharding.layout.region_bytes(engine.num_pages) + FLUSH_BYTES
        tail_bytes = engine.num_tail_slots * engine.tail_slot_bytes + FLUSH_BYTES
        kv, tail = (
            self._fabric.register(SizedRegion(num_bytes=num_bytes), group_index=dp_rank)
            for num_bytes in (kv_bytes, tail_bytes)
        )
        return EngineRegions(kv=(kv,), tail=tail)

    def _on_fabric_event(self, event: FabricEvent) -> None:
        self.core.on_fabric_events((event,), now_ns=self._ground.agenda.now_ns)
        self._happened()

    def _happened(self) -> None:
        """What an event brought about goes out, and idle ranks begin their next pass."""
        ground, core = self._ground, self.core
        for message in core.take_messages():
            ground.to_gateway(self.worker_id, message)
        core.take_ended()
        if core.prefill is not None:
            for grant, instants in core.prefill.take_ended():
                times_ns = instants.times_ns
                if Instant.DRAINED in times_ns and Instant.PREFILL_ENDED in times_ns:
                    ground.on_exposed(grant.request_id, times_ns[Instant.DRAINED] - times_ns[Instant.PREFILL_ENDED])
        for dp_rank, batch in enumerate(self._batches):
            if batch is None:
                self._start_pass(dp_rank)

    def _start_pass(self, dp_rank: int) -> None:
        agenda = self._ground.agenda
        batch = self.core.ranks[dp_rank].next_batch(now_ns=agenda.now_ns)
        if batch is not None:
            self._batches[dp_rank] = batch
            duration_ns = seconds_to_ns(self._pass_times[dp_rank].next_s(shape_of(batch)))
            self._fabric.run_pass(duration_ns)
            agenda.after(duration_ns, partial(self._end_pass, dp_rank, batch, duration_ns))

    def _end_pass(self, dp_rank: int, batch: Batch, duration_ns: int) -> None:
        now_ns = self._ground.agenda.now_ns
        self._batches[dp_rank] = None
        self._busy_ns[dp_rank] += duration_ns
        result = result_of(batch, drafter=self._drafters[dp_rank], started_ns=now_ns - duration_ns, ended_ns=now_ns)
        self.core.ranks[dp_rank].complete(batch, result, now_ns=now_ns)
        self._happened()


def _drop_peer(peer: Incarnation, why: str) -> None:
    """Raises: `InternalError`: what a peer is dropped for does not happen here."""
    raise InternalError(f"peer {peer} is to be dropped: {why}")
