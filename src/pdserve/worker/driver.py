"""Drives the core of one worker with the real clock: fabric events, passes of the engine, time, and what flows out."""

import asyncio
import logging
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager

from pdserve.clock import Clock
from pdserve.engine.port import Engine
from pdserve.fabric.port import Fabric
from pdserve.ids import Incarnation
from pdserve.telemetry.trace import TraceBook
from pdserve.telemetry.worker_metrics import WorkerMetrics
from pdserve.wire.cluster import Generate
from pdserve.wire.peer import Message
from pdserve.worker.core import WorkerCore
from pdserve.worker.stop_at import StopAt
from pdserve.worker.tracing import trace_pass, trace_pushes, trace_request

_log = logging.getLogger(__name__)

TIME_STEP_S = 0.1
"""How often deadlines are looked at; they are seconds long."""


class Driver:
    """Threads: the event loop's only. Everything that happens to the core happens inside `event()`."""

    def __init__(
        self,
        *,
        core: WorkerCore,
        engines: Sequence[Engine],
        fabric: Fabric,
        clock: Clock,
        metrics: WorkerMetrics,
        traces: TraceBook,
        stop_at: StopAt | None = None,
    ) -> None:
        """`engines` by data parallel rank."""
        self.core = core
        self._engines = tuple(engines)
        self._fabric = fabric
        self._clock = clock
        self._metrics = metrics
        self._traces = traces
        self._stop_at = stop_at
        self._wakes = tuple(asyncio.Event() for _ in self._engines)
        self._happened = asyncio.Event()
        """Set by each event, for `_until`."""
        self.status_changed = asyncio.Event()
        """Set when a peer joined or was lost, or the drain began: the gateway should hear of it before the next
        heartbeat is due."""
        self.num_stale_from_gateway = 0
        """Requests and aborts that were meant for another incarnation of this worker (H4)."""
        self.to_gateway: Callable[[Message], None] | None = None
        """Where messages of the decode role go; None while no gateway is connected: they are dropped with it."""

    @contextmanager
    def event(self) -> Generator[int]:
        """The time at which something happens to the core; what it brings about goes out at the end."""
        yield self._clock.now_ns()
        self._flush()
        if self._stop_at is not None:
            self._stop_at.look()
        for wake in self._wakes:
            wake.set()
        self._happened.set()

    def on_generate(self, generate: Generate) -> None:
        with self.event() as now_ns:
            for refusal in self.core.on_generate(generate, now_ns=now_ns):
                self._tell_gateway(refusal)

    def on_fabric_readable(self) -> None:
        """The fabric's descriptor is readable."""
        with self.event() as now_ns:
            self.core.on_fabric_events(self._fabric.poll(), now_ns=now_ns)

    def peer_lost(self, peer: Incarnation) -> None:
        """The connection to a prefill worker ended. What has landed is counted first: one that drains leaves then."""
        with self.event() as now_ns:
            self.core.on_fabric_events(self._fabric.poll(), now_ns=now_ns)
            self.core.peer_lost(peer, now_ns=now_ns)
        self.status_changed.set()

    async def drain(self) -> None:
        """Take on nothing new; return when what is here has ended, and what was pushed has landed."""
        with self.event():
            self.core.drain()
        self.status_changed.set()
        await self._until(lambda: self.core.num_open == 0)
        sender = self.core.sender
        if sender is not None:
            with self.event() as now_ns:
                sender.prove_delivery(now_ns=now_ns)
            await self._until(lambda: sender.num_flushes == 0)

    async def run_passes(self, dp_rank: int) -> None:
        """Run the passes of one rank as long as there is something to compute.

        Raises: `InternalError` when its engine died.
        """
        rank, engine, wake = self.core.ranks[dp_rank], self._engines[dp_rank], self._wakes[dp_rank]
        while True:
            batch = rank.next_batch(now_ns=self._clock.now_ns())
            if batch is None:
                wake.clear()
                await wake.wait()
                continue
            result = await engine.run(batch)
            trace_pass(self._traces, rank, batch, result)
            self._metrics.passes.observe(dp_rank, started_ns=result.started_ns, ended_ns=result.ended_ns)
            with self.event() as now_ns:
                outcome = rank.complete(batch, result, now_ns=now_ns)
            self._metrics.drafts.observe(
                dp_rank, num_tried=outcome.num_drafts, num_accepted=outcome.num_drafts_accepted
            )

    async def run_time(self) -> None:
        """Let deadlines pass."""
        while True:
            await asyncio.sleep(TIME_STEP_S)
            with self.event() as now_ns:
                self.core.on_time(now_ns)

    def refresh_metrics(self) -> None:
        """Bring the gauges up to date; called when somebody looks."""
        stats = self._fabric.stats()
        for dp_rank, load in enumerate(self.core.loads()):
            self._metrics.ranks.set(
                dp_rank,
                num_running=load.num_running,
                num_waiting=load.num_waiting,
                num_free_pages=load.num_free_pages,
                num_quarantined_pages=load.num_quarantined_pages,
            )
        sender, receiver = self.core.sender, self.core.receiver
        self._metrics.set_stale_messages(
            num_from_gateway=self.num_stale_from_gateway,
            num_from_decode=sender.num_stale_messages if sender is not None else 0,
            num_from_prefill=receiver.num_stale_messages if receiver is not None else 0,
        )
        self._metrics.set_fabric(
            num_bytes_pushed=stats.bytes_posted_by_nic,
            num_writes_failed=stats.num_writes_failed,
            num_stale_immediates=stats.num_stale_immediates,
            num_in_flight=stats.num_in_flight,
        )

    async def _until(self, is_so: Callable[[], bool]) -> None:
        """Wait for an event after which it is so."""
        while not is_so():
            self._happened.clear()
            await self._happened.wait()

    def _flush(self) -> None:
        for message in self.core.take_messages():
            self._tell_gateway(message)
        for request in self.core.take_ended():
            self._metrics.observe(request.instants)
            if request.local_reason is not None:
                self._metrics.observe_local_prefill(request.local_reason.value)
            if request.handoff_outcome is not None:
                self._metrics.observe_handoff(request.handoff_outcome.value)
            trace_request(self._traces, request)
        prefill = self.core.prefill
        if prefill is not None:
            trace_pushes(self._traces, prefill.take_pushed())
            for _, instants in prefill.take_ended():
                self._metrics.observe(instants)

    def _tell_gateway(self, message: Message) -> None:
        if self.to_gateway is not None:
            self.to_gateway(message)
