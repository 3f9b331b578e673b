"""Drives the core of one worker with the real clock: fabric events, passes of the engine, time, and what flows out."""

import asyncio
import logging
from collections.abc import Callable, Generator
from contextlib import contextmanager

from pdserve.clock import Clock
from pdserve.engine.port import Engine
from pdserve.fabric.port import Fabric
from pdserve.telemetry.trace import TraceBook
from pdserve.telemetry.worker_metrics import WorkerMetrics
from pdserve.wire.peer import Message
from pdserve.worker.core import WorkerCore
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
        engine: Engine,
        fabric: Fabric,
        clock: Clock,
        metrics: WorkerMetrics,
        traces: TraceBook,
    ) -> None:
        self.core = core
        self._engine = engine
        self._fabric = fabric
        self._clock = clock
        self._metrics = metrics
        self._traces = traces
        self._wake = asyncio.Event()
        self.peers_changed = asyncio.Event()
        """Set when a peer joined or was lost: the gateway should hear of it before the next heartbeat is due."""
        self.num_stale_from_gateway = 0
        """Requests and aborts that were meant for another incarnation of this worker (H4)."""
        self.to_gateway: Callable[[Message], None] | None = None
        """Where messages of the decode role go; None while no gateway is connected: they are dropped with it."""

    @contextmanager
    def event(self) -> Generator[int]:
        """The time at which something happens to the core; what it brings about goes out at the end."""
        yield self._clock.now_ns()
        self._flush()
        self._wake.set()

    def on_fabric_readable(self) -> None:
        """The fabric's descriptor is readable."""
        with self.event() as now_ns:
            self.core.on_fabric_events(self._fabric.poll(), now_ns=now_ns)

    async def run_passes(self) -> None:
        """Run passes as long as there is something to compute. Raises: `InternalError` when the engine died."""
        while True:
            batch = self.core.next_batch(now_ns=self._clock.now_ns())
            if batch is None:
                self._wake.clear()
                await self._wake.wait()
                continue
            result = await self._engine.run(batch)
            trace_pass(self._traces, self.core, batch, result)
            with self.event() as now_ns:
                self.core.complete(batch, result, now_ns=now_ns)

    async def run_time(self) -> None:
        """Let deadlines pass."""
        while True:
            await asyncio.sleep(TIME_STEP_S)
            with self.event() as now_ns:
                self.core.on_time(now_ns)

    def refresh_metrics(self) -> None:
        """Bring the gauges up to date; called when somebody looks."""
        load, stats = self.core.load(), self._fabric.stats()
        self._metrics.set_load(
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
            num_bytes_pushed=stats.bytes_posted,
            num_writes_failed=stats.num_writes_failed,
            num_stale_immediates=stats.num_stale_immediates,
            num_in_flight=stats.num_in_flight,
        )

    def _flush(self) -> None:
        decode, prefill = self.core.decode, self.core.prefill
        if decode is not None:
            for message in decode.take_messages():
                if self.to_gateway is not None:
                    self.to_gateway(message)
            for request in decode.take_ended():
                self._metrics.observe(request.instants)
                if request.local_reason is not None:
                    self._metrics.observe_local_prefill(request.local_reason.value)
                if request.handoff_outcome is not None:
                    self._metrics.observe_handoff(request.handoff_outcome.value)
                trace_request(self._traces, request)
        if prefill is not None:
            trace_pushes(self._traces, self.core, prefill.take_pushed())
            for _, instants in prefill.take_ended():
                self._metrics.observe(instants)
