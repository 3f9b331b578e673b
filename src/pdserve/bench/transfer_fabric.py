"""Page writes with an immediate each through `pdserve.fabric.native`, from this process into a new one.

The region is laid out as a KV region of `NUM_LAYERS` layers, and a round is one push of all its pages. Every layer
counts as computed before the push is armed, so that nothing but the fabric is measured. Each measurement has its own
two fabrics: one that is left open would wake up while the next is measured.
"""

import multiprocessing
import select
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from pdserve.bench.transfer import Contender, Limit, PageRun
from pdserve.errors import ConfigError, HandoffTimeout, InternalError
from pdserve.fabric.native import NativeFabric
from pdserve.fabric.port import (
    IMMEDIATE_GENERATION_BITS,
    Fabric,
    FabricEvent,
    FabricPeerId,
    Landed,
    PagePush,
    PushEnded,
    PushId,
    PushOutcome,
    RegionId,
    RemoteRegionId,
)
from pdserve.ids import Immediate
from pdserve.layer_counter import REGION_BYTES
from pdserve.shared_region import SharedRegion
from pdserve.units import NS_PER_MS, seconds_to_ns

PROVIDERS = {"tcp": Limit.RAW_TCP, "shm": Limit.PROCESS_VM_WRITEV}
NUM_LAYERS = 4
DEADLINE_S = 60.0
SOURCE_FILL = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class KvRun:
    """A run as a KV region sees it."""

    run: PageRun

    @property
    def layer_pages(self) -> int:
        return self.run.num_pages // NUM_LAYERS

    @property
    def layer_bytes(self) -> int:
        return self.layer_pages * self.run.page_bytes

    @property
    def num_writes(self) -> int:
        return NUM_LAYERS * self.layer_pages

    @property
    def num_bytes(self) -> int:
        """Bytes that one round moves."""
        return NUM_LAYERS * self.layer_bytes

    @property
    def phases(self) -> tuple[Sequence[int], Sequence[int]]:
        """The rounds of the warm-up and those that are measured."""
        return range(1), range(1, 1 + self.run.num_rounds)

    def new_region(self) -> SharedRegion:
        return SharedRegion.create(name="bench-transfer", num_bytes=self.num_bytes)

    def push(self, round_index: int, *, peer_id: FabricPeerId, source: RegionId, target: RemoteRegionId) -> PagePush:
        """All pages of all layers in one random order, into the same places."""
        pages = np.random.default_rng(0).permutation(self.layer_pages).astype(np.uint32)
        return PagePush(
            push_id=PushId(round_index),
            peer_id=peer_id,
            source=source,
            target=target,
            immediate=_immediate(round_index),
            source_pages=pages,
            target_pages=pages,
            num_layers=NUM_LAYERS,
            run_bytes=self.run.page_bytes,
            source_page_bytes=self.run.page_bytes,
            target_page_bytes=self.run.page_bytes,
            source_layer_bytes=self.layer_bytes,
            target_layer_bytes=self.layer_bytes,
            first_tick=0,
        )


def fabric_contenders() -> list[Contender]:
    return [
        Contender(provider=provider, limit=limit, measure=partial(measure_fabric, provider))
        for provider, limit in PROVIDERS.items()
    ]


def measure_fabric(provider: str, run: PageRun) -> float:
    """GB/s of one run. Raises: `FabricError`, `HandoffTimeout`; `InternalError` when what landed is wrong."""
    if run.num_pages < NUM_LAYERS:
        raise ConfigError(f"a region of {run.num_pages} pages is too small: at least {NUM_LAYERS} pages are needed")
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    receiver = context.Process(target=receive, args=(provider, run, theirs), daemon=True)
    receiver.start()
    theirs.close()
    try:
        elapsed_ns = _send(provider, KvRun(run=run), ours)
        receiver.join(timeout=DEADLINE_S)
    finally:
        receiver.kill()
        receiver.join()
    return KvRun(run=run).num_bytes * run.num_rounds / elapsed_ns


def receive(provider: str, run: PageRun, pipe: Connection) -> None:
    """The receiving process: says when it expects a phase, when that has landed, and last if the bytes are right."""
    kv_run = KvRun(run=run)
    with closing(kv_run.new_region()) as region, closing(NativeFabric(provider=provider)) as fabric:
        pipe.send((fabric.address, fabric.expose(fabric.register(region))))
        for rounds in kv_run.phases:
            _fill(region, 0)
            deadline_ns = _deadline_ns()
            for round_index in rounds:
                fabric.expect(_immediate(round_index), kv_run.num_writes, deadline_ns=deadline_ns)
            pipe.send("expecting")
            await_events(fabric, Landed, len(rounds))
            pipe.send(time.monotonic_ns())
        pipe.send(region.buffer[: kv_run.num_bytes] == bytes([SOURCE_FILL]) * kv_run.num_bytes)


def _send(provider: str, kv_run: KvRun, pipe: Connection) -> int:
    """Nanoseconds from arming the first measured push to the receiver's notice that the last write has landed."""
    with (
        closing(kv_run.new_region()) as region,
        closing(SharedRegion.create(name="bench-layer-counter", num_bytes=REGION_BYTES)) as counter,
        closing(NativeFabric(provider=provider)) as fabric,
    ):
        _fill(region, SOURCE_FILL)
        np.frombuffer(counter.buffer, dtype=np.uint64, count=1)[0] = NUM_LAYERS
        fabric.watch(counter)
        source = fabric.register(region)
        address, descriptor = _answer(pipe)
        peer_id = fabric.connect(address)
        target = fabric.attach(peer_id, descriptor)
        elapsed_ns = 0
        for rounds in kv_run.phases:
            pushes = [kv_run.push(round_index, peer_id=peer_id, source=source, target=target) for round_index in rounds]
            _answer(pipe)
            start_ns = time.monotonic_ns()
            for push in pushes:
                fabric.arm(push)
            await_events(fabric, PushEnded, len(pushes))
            elapsed_ns = _answer(pipe) - start_ns
        if not _answer(pipe):
            raise InternalError(f"{provider}: what landed is not what was sent")
        return elapsed_ns


def await_events(fabric: Fabric, kind: type[Landed] | type[PushEnded], count: int) -> None:
    """Returns when `count` events of one kind came. Raises: `HandoffTimeout`, or `InternalError` at any other event."""
    deadline_ns = _deadline_ns()
    poller = select.poll()
    poller.register(fabric.fileno(), select.POLLIN)
    num_seen = 0
    while num_seen < count:
        remaining_ms = (deadline_ns - time.monotonic_ns()) // NS_PER_MS
        if remaining_ms <= 0 or not poller.poll(remaining_ms):
            raise HandoffTimeout(f"{num_seen} of {count} {kind.__name__} events came within {DEADLINE_S:.0f} s")
        events = fabric.poll()
        for event in events:
            if not isinstance(event, kind) or _has_failed(event):
                raise InternalError(f"expected {kind.__name__}, got {event}")
        num_seen += len(events)


def _has_failed(event: FabricEvent) -> bool:
    return isinstance(event, PushEnded) and event.outcome is not PushOutcome.DONE


def _answer(pipe: Connection) -> Any:
    if not pipe.poll(DEADLINE_S):
        raise HandoffTimeout(f"the receiving process said nothing for {DEADLINE_S:.0f} s")
    try:
        return pipe.recv()
    except EOFError:
        raise InternalError("the receiving process ended early; its error is above") from None


def _fill(region: SharedRegion, value: int) -> None:
    np.frombuffer(region.buffer, dtype=np.uint8)[:] = value


def _immediate(round_index: int) -> Immediate:
    """Generation 0 of a slot of its own."""
    return Immediate(round_index << IMMEDIATE_GENERATION_BITS)


def _deadline_ns() -> int:
    return time.monotonic_ns() + seconds_to_ns(DEADLINE_S)
