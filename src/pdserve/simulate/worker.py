"""One worker without sockets and processes: the product's core over engines of hashes and a fabric in memory."""

# pyright: reportPrivateUsage=false

from collections.abc import Callable
from dataclasses import dataclass

from msgspec.structs import replace

from pdserve.config.role import Role
from pdserve.config.speculation import Drafter, Speculation
from pdserve.config.worker import WorkerSettings
from pdserve.decode.request import Request
from pdserve.fabric.memory import MemoryNetwork
from pdserve.ids import Incarnation, PageIndex, SequenceId, WorkerId
from pdserve.schedule.batch import Batch, BatchResult
from pdserve.simulate.agenda import Agenda
from pdserve.simulate.connection import ControlNetwork
from pdserve.simulate.engine import HashEngine
from pdserve.simulate.gateway_end import GatewayEnd
from pdserve.simulate.letters import LETTERS
from pdserve.simulate.model import VOCABULARY, HashModel, reference_answer
from pdserve.simulate.peer_links import PeerLinks, PeerServer
from pdserve.simulate.process import Process
from pdserve.simulate.referee import Referee
from pdserve.simulate.short_fabric import ShortFabric
from pdserve.transfer.identity import Identity
from pdserve.transfer.immediates import ImmediatePool
from pdserve.units import NS_PER_MS, NS_PER_US
from pdserve.wire.cluster import FailureKind
from pdserve.wire.peer import Grant, HandoffStopped, Message
from pdserve.worker.core import WorkerCore
from pdserve.worker.surroundings import EngineRegions, Surroundings

LEASE_S = 1.0
HEARTBEAT_S = 0.25
TIME_STEP_NS = 100 * NS_PER_MS
"""As `pdserve.worker.driver`."""

POLL_NS = 20 * NS_PER_US
"""Until a worker sees what its own calls made the fabric say."""

SPECULATION = Speculation(drafter=Drafter.MTP, num_draft_tokens=3)
"""Of workers with a drafter."""

NUM_IMMEDIATES = 6
"""So few that a short life uses each of them again (H5)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerShape:
    role: Role
    num_pages: int
    num_tail_slots: int
    num_nics_by_group: tuple[int, ...]
    """Ranks are spread over the groups. A push is striped over the NICs of one, and only writes of one NIC to one other
    keep their order."""
    max_running: int
    max_waiting: int
    layer_ns: int
    """How long a layer takes, and the sampling."""
    num_ranks: int = 1
    """Tensor parallel, of each data parallel rank."""
    num_dp_ranks: int = 1
    """Of a decode worker. Each has pages, tail slots and a schedule of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ground:
    """What the workers of a world share."""

    model: HashModel
    agenda: Agenda
    control: ControlNetwork
    fabrics: MemoryNetwork
    referee: Referee
    pump: Callable[[], None]
    """Let the fabrics do what is due, and have the workers look at what came of it."""
    on_exit: Callable[["Worker"], None]
    """A worker has drained, or the time for that is over; called once."""


class Worker(Process):
    """After whatever happens to the core comes `happened`."""

    lease_s = LEASE_S
    heartbeat_s = HEARTBEAT_S

    def __init__(self, ground: Ground, name: str, incarnation: Incarnation, shape: WorkerShape) -> None:
        super().__init__(ground.agenda, name)
        self.incarnation = incarnation
        self.shape = shape
        self.ground = ground
        self.engines = tuple(
            HashEngine(
                ground.model,
                num_ranks=shape.num_ranks,
                num_pages=shape.num_pages,
                num_tail_slots=shape.num_tail_slots,
                clock=ground.agenda.clock,
            )
            for _ in range(shape.num_dp_ranks)
        )
        """By data parallel rank."""
        self.fabric = ShortFabric.open(ground.fabrics, num_nics_by_group=shape.num_nics_by_group)
        if shape.role is Role.PREFILL:
            self.fabric.watch(self.engines[0].counter_region)
        self._batches: list[Batch | None] = [None] * shape.num_dp_ranks
        """The running pass of each data parallel rank."""
        self._looks_soon = False
        self._proves_delivery = False
        self._is_leaving = False
        self.peers: PeerLinks | PeerServer
        surroundings = self._surroundings()
        self.settings = surroundings.settings
        self.core = WorkerCore(surroundings)
        if self.core.receiver is not None:
            self.core.receiver._immediates = ImmediatePool(num_slots=NUM_IMMEDIATES)
            self.peers = PeerLinks(self, self.core.receiver)
        else:
            assert self.core.sender is not None
            self.peers = PeerServer(self, self.core.sender)
        self.gateway = GatewayEnd(self)
        ground.referee.started(self)
        self.gateway.join()
        self.every(TIME_STEP_NS, self._on_time)

    def _surroundings(self) -> Surroundings:
        info, fabric = self.engines[0].info, self.fabric
        return Surroundings(
            settings=WorkerSettings(
                name=self.name,
                role=self.shape.role,
                join_url="",
                model_dir="",
                model_name="hashes",
                chunk_tokens=9,
                saturation_tokens=6,
                max_running=self.shape.max_running,
                max_waiting=self.shape.max_waiting,
                lease_s=LEASE_S,
                heartbeat_s=HEARTBEAT_S,
                speculation=None if info.draft_layout is None else SPECULATION,
            ),
            identity=Identity(
                worker_id=WorkerId(self.name),
                incarnation=self.incarnation,
                model_fingerprint=info.model_fingerprint,
                sharding=info.sharding,
                draft_layout=info.draft_layout,
                num_pages=info.num_pages,
                tail_slot_bytes=info.tail_slot_bytes,
            ),
            engine=info,
            fabric=fabric,
            regions=tuple(map(self._register, self.engines)),
            tokenizer=LETTERS,
            outbox=self,
            drop_peer=lambda peer, why: self.peers.drop(peer, why),
            on_prefilled=self._prefilled,
        )

    def _register(self, engine: HashEngine) -> EngineRegions:
        num_groups = len(self.shape.num_nics_by_group)
        return EngineRegions(
            kv=tuple(
                self.fabric.register(kv.region, group_index=rank % num_groups) for rank, kv in enumerate(engine.ranks)
            ),
            draft_kv=None if engine.drafter is None else self.fabric.register(engine.drafter.kv.region),
            tail=self.fabric.register(engine.tail_region),
        )

    # The outbox of the core

    def send(self, peer: Incarnation, message: Message) -> None:
        if isinstance(message, Grant):
            self.ground.referee.granted(message)
        elif isinstance(message, HandoffStopped):
            self.ground.referee.confirmed(self, peer, message.handoff_id)
        self.peers.send(peer, message)

    # What happens

    def poll(self) -> None:
        """Look at what the fabric has to say."""
        self._looks_soon = False
        events = self.fabric.poll()
        if events:
            self.core.on_fabric_events(events, now_ns=self.now_ns)
            self.happened()

    def happened(self) -> None:
        """Something happened to the core: what it brings about goes out, and idle passes may start."""
        for message in self.core.take_messages():
            self.gateway.tell(message)
        self.core.take_ended()
        if self.core.prefill is not None:
            self.core.prefill.take_pushed()
            self.core.prefill.take_ended()
        self.ground.referee.after_event(self)
        self._exit_if_drained()
        for dp_rank, batch in enumerate(self._batches):
            if batch is None:
                self._start_pass(dp_rank)
        if not self._looks_soon:
            self._looks_soon = True
            self.after(POLL_NS, self.poll)

    # Its end

    def drain(self, timeout_ns: int) -> None:
        """As under SIGTERM: as `pdserve.worker.driver` and `process` do, but no longer than that."""
        if not self.core.is_draining:
            self.core.drain()
            self.gateway.beat_soon()
            self.after(timeout_ns, self._exit)
            self.happened()

    def _exit_if_drained(self) -> None:
        core, sender = self.core, self.core.sender
        if not core.is_draining or core.num_open or self._is_leaving:
            return
        if sender is not None and not self._proves_delivery:
            self._proves_delivery = True
            sender.prove_delivery(now_ns=self.now_ns)
        if sender is None or sender.num_flushes == 0:
            self._is_leaving = True
            self.ground.referee.drained(self)
            self.after(0, self._exit)

    def _exit(self) -> None:
        self.core.fail_all(FailureKind.SHUTTING_DOWN, f"worker {self.name} stops", now_ns=self.now_ns)
        for message in self.core.take_messages():
            self.gateway.tell(message)
        self.gateway.say_goodbye()
        self.ground.on_exit(self)

    def close(self) -> None:
        self.fabric.close()
        for engine in self.engines:
            engine.close()

    def _on_time(self) -> None:
        self.core.on_time(self.now_ns)
        self.gateway.on_time()
        self.peers.on_time()
        self.happened()

    def _start_pass(self, dp_rank: int) -> None:
        batch = self._batches[dp_rank] = self.core.ranks[dp_rank].next_batch(now_ns=self.now_ns)
        if batch is not None:
            self.engines[dp_rank].start(batch)
            self.ground.referee.pass_started(self, dp_rank, batch)
            self.after(self.shape.layer_ns, lambda: self._step_pass(dp_rank, batch))

    def _step_pass(self, dp_rank: int, batch: Batch) -> None:
        result = self.engines[dp_rank].step()
        if result is None:
            self.after(self.shape.layer_ns, lambda: self._step_pass(dp_rank, batch))
        else:
            self._batches[dp_rank] = None
            if self.ground.model.draft_layout is not None:
                result = replace(result, drafts=self._guesses(dp_rank, result))
            self.core.ranks[dp_rank].complete(batch, result, now_ns=self.now_ns)
            self.happened()
        if self.core.prefill is not None:
            self.ground.pump()

    def _guesses(self, dp_rank: int, result: BatchResult) -> tuple[tuple[SequenceId, tuple[int, ...]], ...]:
        """What comes next, and now and then something else."""
        known_before = self.core.ranks[dp_rank].scheduler._running
        guesses: list[tuple[SequenceId, tuple[int, ...]]] = []
        for sequence_id, sampled in result.sampled:
            known = (*known_before[sequence_id].token_ids, *sampled)
            right = reference_answer(self.ground.model.layout, known, SPECULATION.num_draft_tokens)
            guess = (token if (len(known) + index) % 5 else VOCABULARY - 1 - token for index, token in enumerate(right))
            guesses.append((sequence_id, tuple(guess)))
        return tuple(guesses)

    def _prefilled(self, dp_rank: int, request: Request, page_indices: tuple[PageIndex, ...]) -> None:
        self.ground.referee.prefilled(self, dp_rank, request, page_indices)
