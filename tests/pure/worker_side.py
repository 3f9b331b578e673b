"""The core of one worker on a scripted fabric: no engine computes, the test says what lands and what is sampled."""

from dataclasses import dataclass, field
from itertools import count

from tests.pure.decode_side import DECODE, LAYOUT, PREFILL
from tests.pure.scripted_fabric import ScriptedFabric
from tests.pure.toy_tokenizer import LETTERS, letter_tokenizer

from pdserve.config.role import Role
from pdserve.config.speculation import Speculation
from pdserve.config.worker import WorkerSettings
from pdserve.decode.request import Request
from pdserve.engine.port import EngineInfo
from pdserve.fabric.port import RegionId
from pdserve.ids import Incarnation, PageIndex, RequestId, WorkerId
from pdserve.kv.shard import KvSharding
from pdserve.sampling import SamplingParams
from pdserve.schedule.batch import BatchResult
from pdserve.transfer.identity import Identity
from pdserve.wire.cluster import Generate, PrefillTarget
from pdserve.wire.peer import Grant, Message
from pdserve.worker.core import WorkerCore
from pdserve.worker.surroundings import EngineRegions, Surroundings

TAIL_BYTES = 64
VOCAB_SIZE = 1000
TARGET = PrefillTarget(worker_id=WorkerId("prefill"), incarnation=PREFILL, url="http://prefill")


@dataclass(slots=True)
class WorkerSide:
    role: Role = Role.DECODE
    num_dp_ranks: int = 2
    num_pages: int = 16
    """Of each data parallel rank."""
    speculation: Speculation | None = None
    sharding: KvSharding = field(default_factory=lambda: KvSharding(layout=LAYOUT, num_ranks=2))
    fabric: ScriptedFabric = field(default_factory=ScriptedFabric)
    sent: list[Message] = field(default_factory=list[Message])
    prefilled: list[tuple[int, RequestId]] = field(default_factory=list[tuple[int, RequestId]])
    """The prompts that were whole, and on which data parallel rank."""
    core: WorkerCore = field(init=False)

    def __post_init__(self) -> None:
        self.core = WorkerCore(self._surroundings())
        if self.core.receiver is not None:
            self.core.receiver.peer_joined(
                worker_id=TARGET.worker_id,
                incarnation=PREFILL,
                sharding=self.sharding,
                regions=self.core.receiver.expose(),
            )

    @property
    def engine_info(self) -> EngineInfo:
        """Of each rank."""
        return EngineInfo(
            sharding=self.sharding,
            num_pages=self.num_pages,
            num_tail_slots=4,
            tail_slot_bytes=TAIL_BYTES,
            max_model_len=60,
            vocab_size=VOCAB_SIZE,
            model_fingerprint="toy",
            pids=(),
        )

    def _surroundings(self) -> Surroundings:
        region_ids = map(RegionId, count())
        return Surroundings(
            settings=WorkerSettings(
                name="worker",
                role=self.role,
                join_url="",
                model_dir="",
                model_name="toy",
                max_running=4,
                chunk_tokens=64,
                speculation=self.speculation,
            ),
            identity=Identity(
                worker_id=WorkerId("worker"),
                incarnation=DECODE,
                model_fingerprint="toy",
                sharding=self.sharding,
                num_pages=self.num_pages,
                tail_slot_bytes=TAIL_BYTES,
            ),
            engine=self.engine_info,
            regions=tuple(
                EngineRegions(kv=tuple(next(region_ids) for _ in range(self.sharding.num_ranks)), tail=next(region_ids))
                for _ in range(self.num_dp_ranks)
            ),
            tokenizer=letter_tokenizer(),
            fabric=self.fabric,
            outbox=self,
            drop_peer=self._drop,
            on_prefilled=self._prefilled,
        )

    def send(self, peer: Incarnation, message: Message) -> None:
        assert peer == PREFILL
        self.sent.append(message)

    def generate(self, name: str, *, dp_rank: int, num_tokens: int = 8, is_remote: bool = True) -> list[Message]:
        request = generate_of(tuple(range(num_tokens)), name=name, dp_rank=dp_rank, is_remote=is_remote)
        return self.core.on_generate(request, now_ns=0)

    def grants(self) -> list[Grant]:
        return [message for message in self.sent if isinstance(message, Grant)]

    def lands(self, grant: Grant) -> None:
        self.core.on_fabric_events([self.fabric.all_land(grant.immediate)], now_ns=0)

    def run_pass(self, dp_rank: int, letter: str) -> list[int]:
        """A pass of one rank in which all that samples gets the letter; the sequences in it."""
        rank = self.core.ranks[dp_rank]
        batch = rank.next_batch(now_ns=0)
        assert batch is not None
        sampled = tuple((chunk.sequence_id, (LETTERS.index(letter),)) for chunk in batch.chunks if chunk.samples)
        result = BatchResult(pass_index=batch.pass_index, sampled=sampled, started_ns=0, ended_ns=0)
        rank.complete(batch, result, now_ns=0)
        return [chunk.sequence_id for chunk in batch.chunks]

    def is_idle(self, dp_rank: int) -> bool:
        rank = self.core.ranks[dp_rank]
        return rank.next_batch(now_ns=0) is None and rank.pool.num_free == self.num_pages

    def _drop(self, peer: Incarnation, why: str) -> None:
        raise AssertionError(f"peer {peer} was dropped: {why}")

    def _prefilled(self, dp_rank: int, request: Request, page_indices: tuple[PageIndex, ...]) -> None:
        assert page_indices
        self.prefilled.append((dp_rank, request.request_id))


def generate_of(
    prompt: tuple[int, ...],
    *,
    name: str = "request",
    dp_rank: int = 0,
    max_tokens: int = 4,
    is_remote: bool = True,
    traced: bool = False,
) -> Generate:
    return Generate(
        request_id=RequestId(name),
        receiver=DECODE,
        dp_rank=dp_rank,
        prompt_token_ids=prompt,
        sampling=SamplingParams(max_tokens=max_tokens),
        prefill=TARGET if is_remote else None,
        timeout_s=30.0,
        traced=traced,
    )
