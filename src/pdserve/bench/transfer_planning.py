"""What the writes of one very long prompt take of the prefill side's Python, chunk by chunk, and of its memory.

The prefill side's `Sender` gets the grant of a prompt of a million tokens and arms every chunk at a native fabric,
which checks and copies the pages. Nothing is written: the armed pushes are cancelled after each chunk, and their ends
go back to the sender. Neither waiting for them nor the forward pass is in the time.
"""

import statistics
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass

import msgspec

from pdserve.bench.fabric_events import await_events
from pdserve.errors import InternalError
from pdserve.fabric.native import NativeFabric
from pdserve.fabric.port import PagePush, PushEnded, PushId, SingleWrite
from pdserve.ids import HandoffId, Immediate, Incarnation, RequestId, TailSlot, WorkerId
from pdserve.kv.layout import KvLayout
from pdserve.kv.shard import KvSharding
from pdserve.layer_counter import REGION_BYTES
from pdserve.shared_region import SharedRegion
from pdserve.transfer.plan import num_writes
from pdserve.transfer.sender import HandoffKey, Sender
from pdserve.transfer.source import Source
from pdserve.units import KIB, NS_PER_MS, div_ceil
from pdserve.wire.peer import PROTOCOL_VERSION, Grant, Message, PeerHello, RankRegions

CHUNK_TOKENS = 8_192
PROMPT_TOKENS = 1_000_000
NUM_RANKS = 8
PROVIDER = "tcp"
TAIL_SLOT_BYTES = 64 * KIB
PREFILL = Incarnation(1)
DECODE = Incarnation(2)

LAYOUTS = {
    "GQA": KvLayout(num_layers=61, num_kv_heads=8, head_dim=128, page_slots=16, dtype="bfloat16"),
    "MLA": KvLayout(num_layers=61, num_kv_heads=1, head_dim=576, page_slots=16, dtype="bfloat16", num_planes=1),
}


class PlanningRow(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt, planned `repetitions` times, and once more with its allocations traced."""

    cache: str
    source_ranks: int
    target_ranks: int
    num_tokens: int
    num_layers: int
    num_pages: int
    chunk_tokens: int
    num_writes: int
    """That the pushes of all chunks stand for."""
    first_chunk_ms: float
    """Median over the repetitions; the fabric opens its way to a new peer in it."""
    chunk_ms_p50: float
    """Median over the repetitions of the median over the other chunks."""
    spread: float
    """Greatest minus least of the repetitions' medians, over their median."""
    chunk_ms_max: float
    """The slowest of the other chunks of all repetitions."""
    first_chunk_peak_bytes: int
    """The most that Python allocated for the first chunk."""
    peak_bytes: int
    """The most for any chunk. Of it, 16 bytes a page are the list of all pages so far that comes with a chunk."""


class CancellingFabric(NativeFabric):
    """Remembers what was armed, so that it can be cancelled instead of posted."""

    def __init__(self, provider: str) -> None:
        super().__init__(provider)
        self._armed: list[PushId] = []

    def arm(self, push: PagePush | SingleWrite) -> None:
        super().arm(push)
        self._armed.append(push.push_id)

    def end_all(self) -> list[PushEnded]:
        """The ends of everything that was armed since the last call."""
        for push_id in self._armed:
            self.cancel(push_id)
        ended = await_events(self, PushEnded, len(self._armed))
        self._armed.clear()
        return ended


class SilentOutbox:
    """A control connection that nothing is said on."""

    def send(self, peer: Incarnation, message: Message) -> None:
        raise InternalError(f"the sender says {message} to {peer}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LongPrompt:
    """A handoff of which nothing is held, between workers of `NUM_RANKS` ranks each, and the way it is cut."""

    layout: KvLayout
    num_tokens: int

    @property
    def sharding(self) -> KvSharding:
        return KvSharding(layout=self.layout, num_ranks=NUM_RANKS)

    @property
    def num_computed(self) -> int:
        """The last token is the decode side's."""
        return self.num_tokens - 1

    @property
    def num_pages(self) -> int:
        return self.layout.num_pages_for(self.num_computed)

    @property
    def chunks(self) -> Iterator[tuple[int, int]]:
        for start in range(0, self.num_computed, CHUNK_TOKENS):
            yield start, min(start + CHUNK_TOKENS, self.num_computed)

    @property
    def page_indices(self) -> list[int]:
        """Scattered over the whole pool, as after many other prompts: 7,919 is prime."""
        return [position * 7_919 % self.num_pages for position in range(self.num_pages)]

    def grant(self) -> Grant:
        return Grant(
            sender=DECODE,
            receiver=PREFILL,
            handoff_id=HandoffId(1),
            request_id=RequestId("bench"),
            dp_rank=0,
            token_ids=(0,) * self.num_tokens,
            num_held_tokens=0,
            page_indices=tuple(self.page_indices),
            immediate=Immediate(0),
            tail_slot=TailSlot(0),
            timeout_s=60.0,
        )

    def hello(self, *, fabric_address: bytes, regions: RankRegions) -> PeerHello:
        return PeerHello(
            protocol_version=PROTOCOL_VERSION,
            worker_id=WorkerId("bench-decode"),
            incarnation=DECODE,
            model_fingerprint="",
            sharding=self.sharding,
            num_pages=self.num_pages,
            tail_slot_bytes=TAIL_SLOT_BYTES,
            heartbeat_s=1.0,
            lease_s=10.0,
            fabric_provider=PROVIDER,
            fabric_address=fabric_address,
            regions=(regions,),
        )


class PlanningSide:
    """A sender with the fabric and the regions of its ranks, and a decode side that only lends addresses.

    The regions have their full extents and no memory: nothing is ever written.
    """

    def __init__(self, prompt: LongPrompt, stack: ExitStack) -> None:
        self._prompt = prompt
        self._stack = stack
        self._page_indices = prompt.page_indices
        region_bytes = prompt.sharding.rank_layout.region_bytes(prompt.num_pages)
        targets = [self._new_region(region_bytes) for _ in range(NUM_RANKS)]
        sources = [self._new_region(region_bytes) for _ in range(NUM_RANKS)]
        tails = [self._new_region(TAIL_SLOT_BYTES) for _ in range(2)]
        counter = self._new_region(REGION_BYTES)
        decode = stack.enter_context(closing(NativeFabric(PROVIDER)))
        self.fabric = stack.enter_context(closing(CancellingFabric(PROVIDER)))
        self.fabric.watch(counter)
        self.sender = Sender(
            incarnation=PREFILL,
            source=Source(
                sharding=prompt.sharding,
                num_pages=prompt.num_pages,
                kv_regions=tuple(self.fabric.register(region) for region in sources),
                tail_region=self.fabric.register(tails[0]),
                tail_slot_bytes=TAIL_SLOT_BYTES,
            ),
            fabric=self.fabric,
            outbox=SilentOutbox(),
            drop_peer=_never_dropped,
        )
        regions = RankRegions(
            kv=tuple(decode.expose(decode.register(region)) for region in targets),
            tail=decode.expose(decode.register(tails[1])),
        )
        self.sender.peer_joined(prompt.hello(fabric_address=decode.address, regions=regions))

    def _new_region(self, num_bytes: int) -> SharedRegion:
        return self._stack.enter_context(closing(SharedRegion.create(name="bench-planning", num_bytes=num_bytes)))

    def admit(self) -> HandoffKey:
        key = self.sender.admit(DECODE, self._prompt.grant())
        if key is None:
            raise InternalError("the sender takes its own grant for stale")
        return key

    def plan(self, key: HandoffKey) -> Iterator[int]:
        """Arms chunk after chunk; yields the nanoseconds that each took, when its pushes have ended."""
        sender, page_slots = self.sender, self._prompt.layout.page_slots
        for pass_index, (start, stop) in enumerate(self._prompt.chunks):
            is_last = stop == self._prompt.num_computed
            armed_at_ns = time.monotonic_ns()
            sender.arm(
                key,
                pass_index=pass_index,
                start=start,
                stop=stop,
                page_indices=tuple(self._page_indices[: div_ceil(stop, page_slots)]),
                tail_slot=TailSlot(0) if is_last else None,
            )
            elapsed_ns = time.monotonic_ns() - armed_at_ns
            ends = self.fabric.end_all()
            ended_at_ns = time.monotonic_ns()
            for ended in ends:
                sender.on_push_ended(ended, now_ns=ended_at_ns)
            sender.pass_ended(key, now_ns=ended_at_ns)
            sender.take_pushed()
            yield elapsed_ns + time.monotonic_ns() - ended_at_ns
        if [closed for closed, _ in sender.take_closed()] != [key]:
            raise InternalError("the handoff did not end with its last chunk")


def measure_planning(
    *, repetitions: int, on_run: Callable[[str], None], num_tokens: int = PROMPT_TOKENS
) -> Iterator[PlanningRow]:
    """A row for each kind of cache.

    Requires: a prompt of at least two chunks. Raises: `FabricError`, `CapacityError`.
    """
    for cache, layout in LAYOUTS.items():
        on_run(f"planning, {cache} {NUM_RANKS}-{NUM_RANKS}")
        prompt = LongPrompt(layout=layout, num_tokens=num_tokens)
        chunks_ns = [_timed(prompt) for _ in range(repetitions)]
        medians_ns = [statistics.median(others_ns) for _, *others_ns in chunks_ns]
        peaks = _traced_peaks(prompt)
        sharding = prompt.sharding
        yield PlanningRow(
            cache=cache,
            source_ranks=sharding.num_ranks,
            target_ranks=sharding.num_ranks,
            num_tokens=num_tokens,
            num_layers=layout.num_layers,
            num_pages=prompt.num_pages,
            chunk_tokens=CHUNK_TOKENS,
            num_writes=num_writes(sharding, sharding, num_held_tokens=0, num_prompt_tokens=num_tokens),
            first_chunk_ms=statistics.median(first_ns for first_ns, *_ in chunks_ns) / NS_PER_MS,
            chunk_ms_p50=statistics.median(medians_ns) / NS_PER_MS,
            spread=(max(medians_ns) - min(medians_ns)) / statistics.median(medians_ns),
            chunk_ms_max=max(max(others_ns) for _, *others_ns in chunks_ns) / NS_PER_MS,
            first_chunk_peak_bytes=peaks[0],
            peak_bytes=max(peaks),
        )


def _timed(prompt: LongPrompt) -> list[int]:
    """Nanoseconds of each chunk."""
    with ExitStack() as stack:
        side = PlanningSide(prompt, stack)
        return list(side.plan(side.admit()))


def _traced_peaks(prompt: LongPrompt) -> list[int]:
    """The most bytes that Python had allocated since the first chunk, at the end of each chunk."""
    with ExitStack() as stack:
        side = PlanningSide(prompt, stack)
        key = side.admit()
        tracemalloc.start()
        stack.callback(tracemalloc.stop)
        return [tracemalloc.get_traced_memory()[1] for _ in side.plan(key)]


def _never_dropped(peer: Incarnation, why: str) -> None:
    raise InternalError(f"the sender drops peer {peer}: {why}")
