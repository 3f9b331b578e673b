"""Page writes with an immediate each through `pdserve.fabric.native`, from this process into a new one.

A round is one handoff: its pushes, one for each pair of ranks, over all pages of all layers. Every layer counts as
computed before a push is armed, so that nothing but the fabric is measured. Each measurement has its own two fabrics:
one that is left open would wake up while the next is measured.
"""

import multiprocessing
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import count
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pdserve.bench.fabric_events import DEADLINE_S, await_events
from pdserve.bench.transfer import Limit, PageRun
from pdserve.errors import ConfigError, HandoffTimeout, InternalError
from pdserve.fabric.native import NativeFabric
from pdserve.fabric.port import (
    IMMEDIATE_GENERATION_BITS,
    DomainGroup,
    Fabric,
    Landed,
    PagePush,
    PushEnded,
    PushId,
    PushOutcome,
    RegionDescriptor,
    RegionId,
)
from pdserve.ids import HandoffId, Immediate
from pdserve.kv.layout import DTYPE_BYTES, KvLayout
from pdserve.kv.shard import KvSharding
from pdserve.layer_counter import REGION_BYTES
from pdserve.shared_region import SharedRegion
from pdserve.transfer.plan import num_rank_pairs, rank_pairs
from pdserve.transfer.source import Source
from pdserve.transfer.target import Target
from pdserve.units import seconds_to_ns

PROVIDERS = {"tcp": Limit.RAW_TCP, "shm": Limit.PROCESS_VM_WRITEV}
NUM_LAYERS = 4
"""Of a KV region that is measured as pages of one rank."""
PAGE_DTYPE = "float16"


@dataclass(frozen=True, slots=True, kw_only=True)
class PushRun:
    """Handoffs of all pages of a pool, from the ranks of one process to those of another."""

    provider: str
    bind_hosts: tuple[str, ...] = ("127.0.0.1",)
    """The addresses of the NICs that both sides have; those of a group."""
    source: KvSharding
    target: KvSharding
    num_pages: int
    num_rounds: int

    @property
    def num_writes(self) -> int:
        """Of one round."""
        return self.target.layout.num_layers * self.num_pages * num_rank_pairs(self.source, self.target)

    @property
    def num_bytes(self) -> int:
        """Written in one round."""
        return self.target.num_ranks * self.target.rank_layout.region_bytes(self.num_pages)

    @property
    def phases(self) -> tuple[Sequence[int], Sequence[int]]:
        """The rounds of the warm-up and those that are measured."""
        return range(1), range(1, 1 + self.num_rounds)

    def open_fabric(self) -> NativeFabric:
        return NativeFabric(self.provider, groups=(DomainGroup(bind_hosts=self.bind_hosts),))

    def pushes(self, round_index: int, *, source: Source, target: Target) -> list[PagePush]:
        """All pages of all layers, for all pairs of ranks, in one random order and into the same places."""
        pages = tuple(np.random.default_rng(0).permutation(self.num_pages).tolist())
        pairs = rank_pairs(self.source, self.target, handoff_id=HandoffId(round_index))
        pushes = source.page_pushes(
            target,
            pairs,
            push_ids=map(PushId, count(round_index * len(pairs))),
            immediate=_immediate(round_index),
            source_pages=pages,
            target_pages=pages,
            first_tick=0,
        )
        return list(pushes)


class RankRegions:
    """The KV regions of one side's ranks, registered.

    Lifetime: closed after the fabric.
    """

    def __init__(self, sharding: KvSharding, *, num_pages: int) -> None:
        self._sharding = sharding
        self._num_pages = num_pages
        num_bytes = sharding.rank_layout.region_bytes(num_pages)
        self._regions = [
            SharedRegion.create(name=f"bench-rank-{rank}", num_bytes=num_bytes) for rank in range(sharding.num_ranks)
        ]

    def close(self) -> None:
        for region in self._regions:
            region.close()

    def register(self, fabric: Fabric) -> tuple[RegionId, ...]:
        return tuple(fabric.register(region) for region in self._regions)

    def fill_with_heads(self) -> None:
        """Every byte becomes the number of its head, counted from 1."""
        for rank in range(self._sharding.num_ranks):
            self._bytes_of(rank)[:] = self._numbers_of(rank)

    def clear(self) -> None:
        for rank in range(self._sharding.num_ranks):
            self._bytes_of(rank)[:] = 0

    def hold_heads(self) -> bool:
        """Whether every byte is the number of its head."""
        return all(
            bool((self._bytes_of(rank) == self._numbers_of(rank)).all()) for rank in range(self._sharding.num_ranks)
        )

    def _bytes_of(self, rank: int) -> NDArray[np.uint8]:
        """The region of a rank by page, head and byte."""
        layout = self._sharding.rank_layout
        flat = np.frombuffer(self._regions[rank].buffer, np.uint8, count=layout.region_bytes(self._num_pages))
        return flat.reshape(-1, layout.num_kv_heads, layout.head_bytes)

    def _numbers_of(self, rank: int) -> NDArray[np.uint8]:
        return np.array(self._sharding.heads_of(rank), np.uint8)[:, None] + np.uint8(1)


def measure_pages(provider: str, run: PageRun) -> float:
    """GB/s of a run of one rank's pages. Raises: as `measure_push_run`."""
    if run.num_pages < NUM_LAYERS:
        raise ConfigError(f"a region of {run.num_pages} pages is too small: at least {NUM_LAYERS} pages are needed")
    head_dim, odd_bytes = divmod(run.page_bytes, DTYPE_BYTES[PAGE_DTYPE])
    if odd_bytes:
        raise ConfigError(f"a page of {run.page_bytes} bytes holds no whole number of {PAGE_DTYPE} values")
    layout = KvLayout(
        num_layers=NUM_LAYERS, num_kv_heads=1, head_dim=head_dim, page_slots=1, dtype=PAGE_DTYPE, num_planes=1
    )
    sharding = KvSharding(layout=layout)
    return measure_push_run(
        PushRun(
            provider=provider,
            source=sharding,
            target=sharding,
            num_pages=run.num_pages // NUM_LAYERS,
            num_rounds=run.num_rounds,
        )
    )


def measure_push_run(run: PushRun) -> float:
    """GB/s of one run. Raises: `FabricError`, `HandoffTimeout`; `InternalError` when what landed is wrong."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    receiver = context.Process(target=receive, args=(run, theirs), daemon=True)
    receiver.start()
    theirs.close()
    try:
        elapsed_ns = _send(run, ours)
        receiver.join(timeout=DEADLINE_S)
    finally:
        receiver.kill()
        receiver.join()
    return run.num_bytes * run.num_rounds / elapsed_ns


def receive(run: PushRun, pipe: Connection) -> None:
    """The receiving process: says when it expects a phase, when that has landed, and last if the bytes are right."""
    with closing(RankRegions(run.target, num_pages=run.num_pages)) as regions, closing(run.open_fabric()) as fabric:
        pipe.send((fabric.address, [fabric.expose(region_id) for region_id in regions.register(fabric)]))
        for rounds in run.phases:
            regions.clear()
            deadline_ns = time.monotonic_ns() + seconds_to_ns(DEADLINE_S)
            for round_index in rounds:
                fabric.expect(_immediate(round_index), run.num_writes, deadline_ns=deadline_ns)
            pipe.send("expecting")
            await_events(fabric, Landed, len(rounds))
            pipe.send(time.monotonic_ns())
        pipe.send(regions.hold_heads())


def _send(run: PushRun, pipe: Connection) -> int:
    """Nanoseconds from arming the first measured push to the receiver's notice that the last write has landed."""
    with ExitStack() as stack:
        regions = stack.enter_context(closing(RankRegions(run.source, num_pages=run.num_pages)))
        counter = stack.enter_context(closing(SharedRegion.create(name="bench-counter", num_bytes=REGION_BYTES)))
        fabric = stack.enter_context(closing(run.open_fabric()))
        regions.fill_with_heads()
        np.frombuffer(counter.buffer, dtype=np.uint64, count=1)[0] = run.source.layout.num_layers
        fabric.watch(counter)
        source = _source_of(run, regions.register(fabric))
        target = _target_of(run, fabric, *_answer(pipe))
        elapsed_ns = 0
        for rounds in run.phases:
            pushes = [push for round_index in rounds for push in run.pushes(round_index, source=source, target=target)]
            _answer(pipe)
            start_ns = time.monotonic_ns()
            for push in pushes:
                fabric.arm(push)
            for ended in await_events(fabric, PushEnded, len(pushes)):
                if ended.outcome is not PushOutcome.DONE:
                    raise InternalError(f"{run.provider}: {ended}")
            elapsed_ns = _answer(pipe) - start_ns
        if not _answer(pipe):
            raise InternalError(f"{run.provider}: what landed is not what was sent")
        return elapsed_ns


def _source_of(run: PushRun, kv_regions: tuple[RegionId, ...]) -> Source:
    """Without a tail: its region is none of its own."""
    return Source(
        sharding=run.source,
        num_pages=run.num_pages,
        kv_regions=kv_regions,
        tail_region=kv_regions[0],
        tail_slot_bytes=0,
    )


def _target_of(run: PushRun, fabric: Fabric, address: bytes, descriptors: list[RegionDescriptor]) -> Target:
    peer_id = fabric.connect(address)
    kv = tuple(fabric.attach(peer_id, descriptor) for descriptor in descriptors)
    return Target(peer_id=peer_id, sharding=run.target, num_pages=run.num_pages, kv=kv, tail=kv[0], num_tail_slots=0)


def _answer(pipe: Connection) -> Any:
    if not pipe.poll(DEADLINE_S):
        raise HandoffTimeout(f"the receiving process said nothing for {DEADLINE_S:.0f} s")
    try:
        return pipe.recv()
    except EOFError:
        raise InternalError("the receiving process ended early; its error is above") from None


def _immediate(round_index: int) -> Immediate:
    """Generation 0 of a slot of its own."""
    return Immediate(round_index << IMMEDIATE_GENERATION_BITS)
