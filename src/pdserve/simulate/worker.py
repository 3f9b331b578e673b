"""One worker without sockets and ranks: the product's core over an engine of hashes and a fabric in memory."""

# pyright: reportPrivateUsage=false

from collections.abc import Callable
from dataclasses import dataclass

from pdserve.config.role import Role
from pdserve.config.worker import WorkerSettings
from pdserve.decode.request import Request
from pdserve.fabric.memory import MemoryNetwork
from pdserve.ids import Incarnation, PageIndex, WorkerId
from pdserve.schedule.batch import Batch
from pdserve.simulate.agenda import Agenda
from pdserve.simulate.connection import ControlNetwork
from pdserve.simulate.engine import HashEngine
from pdserve.simulate.gateway_end import GatewayEnd
from pdserve.simulate.letters import LETTERS
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

NUM_IMMEDIATES = 6
"""So few that a short life uses each of them again (H5)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerShape:
    role: Role
    num_pages: int
    num_tail_slots: int
    num_nics: int
    """A push is striped over them, and only writes of one NIC to one other keep their order."""
    max_running: int
    max_waiting: int
    layer_ns: int
    """How long a layer takes, and the sampling."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ground:
    """What the workers of a world share."""

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
        self.engine = HashEngine(
            num_pages=shape.num_pages, num_tail_slots=shape.num_tail_slots, clock=ground.agenda.clock
        )
        self.fabric = ShortFabric.open(ground.fabrics, num_nics=shape.num_nics)
        if shape.role is Role.PREFILL:
            self.fabric.watch(self.engine.counter_region)
        self._batch: Batch | None = None
        self._looks_soon = False
        self._proves_delivery = False
        self._is_leaving = False
        self.peers: PeerLinks | PeerServer
        self.core = WorkerCore(self._surroundings())
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
        info, fabric = self.engine.info, self.fabric
        kv_region, tail_region = fabric.register(self.engine.kv_region), fabric.register(self.engine.tail_region)
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
            ),
            identity=Identity(
                worker_id=WorkerId(self.name),
                incarnation=self.incarnation,
                model_fingerprint=info.model_fingerprint,
                sharding=info.sharding,
                num_pages=info.num_pages,
                tail_slot_bytes=info.tail_slot_bytes,
            ),
            engine=info,
            fabric=fabric,
            regions=(EngineRegions(kv=(kv_region,), tail=tail_region),),
            tokenizer=LETTERS,
            outbox=self,
            drop_peer=lambda peer, why: self.peers.drop(peer, why),
            on_prefilled=self._prefilled,
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
        if self._batch is None:
            self._start_pass()
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
        self.engine.close()

    def _on_time(self) -> None:
        self.core.on_time(self.now_ns)
        self.gateway.on_time()
        self.peers.on_time()
        self.happened()

    def _start_pass(self) -> None:
        self._batch = self.core.ranks[0].next_batch(now_ns=self.now_ns)
        if self._batch is not None:
            self.engine.start(self._batch)
            self.after(self.shape.layer_ns, self._step_pass)

    def _step_pass(self) -> None:
        batch = self._batch
        assert batch is not None
        result = self.engine.step()
        if result is None:
            self.after(self.shape.layer_ns, self._step_pass)
        else:
            self._batch = None
            self.core.ranks[0].complete(batch, result, now_ns=self.now_ns)
            self.happened()
        if self.core.prefill is not None:
            self.ground.pump()

    def _prefilled(self, dp_rank: int, request: Request, page_indices: tuple[PageIndex, ...]) -> None:
        del dp_rank
        self.ground.referee.prefilled(self, request, page_indices)
