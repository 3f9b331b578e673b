"""One worker without its process: the core, the engines of its data parallel ranks, a fabric, and its connections."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from msgspec.structs import replace
from tests.pure.handoff_rules import Referee, require_kv, shrink_immediates, token_ids_of
from tests.pure.toy_engine import ToyEngine
from tests.pure.toy_kv import WatchedBuffer
from tests.pure.toy_model import VOCABULARY, reference_tokens
from tests.pure.toy_tokenizer import letter_tokenizer

from pdserve.clock import VirtualClock
from pdserve.config.role import Role
from pdserve.config.speculation import Drafter, Speculation
from pdserve.config.worker import WorkerSettings
from pdserve.decode.request import Request
from pdserve.errors import CapacityError
from pdserve.fabric.memory import MemoryFabric, MemoryNetwork
from pdserve.fabric.port import PagePush, SingleWrite
from pdserve.ids import Incarnation, PageIndex, SequenceId, WorkerId
from pdserve.kv.layout import KvLayout
from pdserve.kv.shard import KvSharding
from pdserve.schedule.batch import Batch, BatchResult
from pdserve.shared_region import SharedRegion
from pdserve.transfer.destination import exposures_of
from pdserve.transfer.identity import Identity
from pdserve.wire.peer import PROTOCOL_VERSION, Grant, HandoffStopped, Message, PeerHello, RankRegions
from pdserve.worker.core import WorkerCore
from pdserve.worker.surroundings import EngineRegions, Surroundings

MAX_MODEL_LEN = 48
SPECULATION = Speculation(drafter=Drafter.MTP, num_draft_tokens=3)
"""Of workers with a drafter."""
NUM_TAIL_SLOTS = 4
NICS_BY_GROUP = (1, 2)
"""The regions of a worker's ranks are spread over two domain groups, so that pushes take several ways."""


class ShortFabric(MemoryFabric):
    """A fabric that is sometimes short of room for a push."""

    num_armable: int | None = None
    """How many more pushes it takes before it refuses one; None: any number."""

    def arm(self, push: PagePush | SingleWrite) -> None:
        if self.num_armable == 0:
            self.num_armable = None
            raise CapacityError("too much is armed", retry_after_s=1.0)
        if self.num_armable is not None:
            self.num_armable -= 1
        super().arm(push)


@dataclass(slots=True, eq=False)
class Link:
    """The control connection of a pair: ordered both ways; when it breaks, each end sees it after what still came."""

    decode: "Worker"
    prefill: "Worker"
    regions: tuple[RankRegions, ...]
    """What the prefill worker was given keys for."""
    to_prefill: deque[Message] = field(default_factory=deque[Message])
    to_decode: deque[Message] = field(default_factory=deque[Message])
    is_open: bool = True
    decode_knows: bool = False
    prefill_knows: bool = False


@dataclass(slots=True, kw_only=True)
class Ground:
    """What the workers of a world share."""

    clock: VirtualClock
    network: MemoryNetwork
    referee: Referee
    links: list[Link] = field(default_factory=list[Link])

    def links_of(self, one: Incarnation, other: Incarnation) -> list[Link]:
        return [link for link in self.links if {link.decode.incarnation, link.prefill.incarnation} == {one, other}]


class Worker:
    """Everything that it does is a method, and happens when a world says so."""

    def __init__(
        self,
        ground: Ground,
        role: Role,
        *,
        incarnation: Incarnation,
        sharding: KvSharding,
        draft_layout: KvLayout | None,
        num_pages: int,
        num_dp_ranks: int = 1,
    ) -> None:
        """`num_pages` of each data parallel rank."""
        self.role = role
        self.incarnation = incarnation
        self.engines = tuple(
            ToyEngine(
                sharding,
                draft_layout=draft_layout,
                num_pages=num_pages,
                num_tail_slots=NUM_TAIL_SLOTS,
                max_model_len=MAX_MODEL_LEN,
                clock=ground.clock,
            )
            for _ in range(num_dp_ranks)
        )
        network = ground.network
        self.fabric = ShortFabric(network, index=len(network.fabrics), num_nics_by_group=NICS_BY_GROUP)
        network.fabrics.append(self.fabric)
        if role is Role.PREFILL:
            self.fabric.watch(self.engines[0].counter_region)
        self.is_stalled = False
        self._ground = ground
        self._batches: list[Batch | None] = [None] * num_dp_ranks
        """The running pass of each data parallel rank."""
        self.identity = self._identity(sharding)
        self.core = WorkerCore(self._surroundings())
        if self.core.receiver is not None:
            shrink_immediates(self.core.receiver)

    def _identity(self, sharding: KvSharding) -> Identity:
        info = self.engines[0].info
        return Identity(
            worker_id=WorkerId(f"{self.role.value}-{self.incarnation}"),
            incarnation=self.incarnation,
            model_fingerprint=info.model_fingerprint,
            sharding=sharding,
            draft_layout=info.draft_layout,
            num_pages=info.num_pages,
            tail_slot_bytes=info.tail_slot_bytes,
        )

    def _surroundings(self) -> Surroundings:
        return Surroundings(
            settings=WorkerSettings(
                name=self.identity.worker_id,
                role=self.role,
                join_url="",
                model_dir="",
                model_name="toy",
                chunk_tokens=7,
                saturation_tokens=5,
                max_running=5,
                max_waiting=3,
                speculation=None if self.identity.draft_layout is None else SPECULATION,
            ),
            identity=self.identity,
            engine=self.engines[0].info,
            fabric=self.fabric,
            regions=tuple(self._register(dp_rank, engine) for dp_rank, engine in enumerate(self.engines)),
            tokenizer=letter_tokenizer(),
            outbox=self,
            drop_peer=self._drop,
            on_prefilled=self._prefilled,
        )

    def _register(self, dp_rank: int, engine: ToyEngine) -> EngineRegions:
        """Make the regions of a data parallel rank known to the fabric, and have the referee see what is written."""
        referee = self._ground.referee
        watch(engine.tail_region, partial(self._tail_written, dp_rank))
        for rank, kv in enumerate(engine.ranks):
            watch(kv.region, partial(referee.kv_written, self, dp_rank, rank))
        if engine.drafter is not None:
            watch(engine.drafter.kv.region, partial(referee.draft_kv_written, self, dp_rank))
        return EngineRegions(
            kv=tuple(
                self.fabric.register(kv.region, group_index=rank % len(NICS_BY_GROUP))
                for rank, kv in enumerate(engine.ranks)
            ),
            draft_kv=None if engine.drafter is None else self.fabric.register(engine.drafter.kv.region),
            tail=self.fabric.register(engine.tail_region),
        )

    def hello(self) -> PeerHello:
        """A decode worker's, with keys for one peer."""
        assert self.core.receiver is not None
        return PeerHello(
            protocol_version=PROTOCOL_VERSION,
            worker_id=self.identity.worker_id,
            incarnation=self.incarnation,
            model_fingerprint=self.identity.model_fingerprint,
            sharding=self.identity.sharding,
            draft_layout=self.identity.draft_layout,
            num_pages=self.identity.num_pages,
            tail_slot_bytes=self.identity.tail_slot_bytes,
            heartbeat_s=1.0,
            lease_s=3.0,
            fabric_provider=self.fabric.provider,
            fabric_address=self.fabric.address,
            regions=self.core.receiver.expose(),
        )

    def send(self, peer: Incarnation, message: Message) -> None:
        if isinstance(message, Grant):
            self._ground.referee.granted(message)
        for link in self._ground.links_of(self.incarnation, peer):
            if link.is_open:
                (link.to_prefill if link.decode is self else link.to_decode).append(message)
                if isinstance(message, HandoffStopped):
                    self._confirmed(link, message)

    def poll(self) -> None:
        self.core.on_fabric_events(self.fabric.poll(), now_ns=self._ground.clock.now_ns())

    @property
    def is_in_pass(self) -> bool:
        return any(batch is not None for batch in self._batches)

    def step_pass(self, dp_rank: int) -> None:
        """Start a pass of one data parallel rank, compute a layer of it, or end it."""
        batch, rank, engine = self._batches[dp_rank], self.core.ranks[dp_rank], self.engines[dp_rank]
        now_ns = self._ground.clock.now_ns()
        if batch is None:
            batch = self._batches[dp_rank] = rank.next_batch(now_ns=now_ns)
            if batch is not None:
                self._ground.referee.batch_starts(self, dp_rank, batch)
                engine.start(batch)
            return
        result = engine.step()
        if result is not None:
            self._batches[dp_rank] = None
            if engine.drafter is not None:
                result = replace(result, drafts=self._guesses(dp_rank, result))
            rank.complete(batch, result, now_ns=now_ns)

    def _guesses(self, dp_rank: int, result: BatchResult) -> tuple[tuple[SequenceId, tuple[int, ...]], ...]:
        """What comes next, and now and then something else."""
        layout = self.identity.sharding.layout
        guesses: list[tuple[SequenceId, tuple[int, ...]]] = []
        for sequence_id, sampled in result.sampled:
            known = (*token_ids_of(self.core.ranks[dp_rank], sequence_id), *sampled)
            right = reference_tokens(layout, known, SPECULATION.num_draft_tokens)
            guess = [token if (len(known) + index) % 5 else VOCABULARY - 1 - token for index, token in enumerate(right)]
            guesses.append((sequence_id, tuple(guess)))
        return tuple(guesses)

    def close(self) -> None:
        self.fabric.close()
        for engine in self.engines:
            engine.close()

    def _drop(self, peer: Incarnation, why: str) -> None:
        del why
        for link in self._ground.links_of(self.incarnation, peer):
            link.is_open = False

    def _prefilled(self, dp_rank: int, request: Request, page_indices: tuple[PageIndex, ...]) -> None:
        require_kv(self.engines[dp_rank], request.generate.prompt_token_ids[:-1], page_indices)

    def _tail_written(self, dp_rank: int, start: int, stop: int) -> None:
        tail = self.engines[dp_rank].tail_region.buffer[start:stop]
        self._ground.referee.tail_written(self, dp_rank, start, tail)

    def _confirmed(self, link: Link, message: HandoffStopped) -> None:
        exposures = self._ground.network.exposures
        keys = [exposure.slices[0].keys[0] for exposure in exposures_of(link.regions)]
        num_in_flight = sum(exposures[key].num_in_flight for key in keys if key in exposures)
        self._ground.referee.confirmed(self, link.decode, message.handoff_id, num_in_flight=num_in_flight)


def watch(region: SharedRegion, on_write: Callable[[int, int], None]) -> None:
    assert isinstance(region.buffer, WatchedBuffer)
    region.buffer.on_write = on_write
