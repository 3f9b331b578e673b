"""A worker from start to stop: engine, fabric, roles, connections, and their orderly end."""

import asyncio
import logging
import secrets
import signal
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from itertools import islice
from pathlib import Path

import aiohttp
from aiohttp import web

from pdserve.clock import SystemClock
from pdserve.config.cores import share_of_cpus
from pdserve.config.device import Device
from pdserve.config.role import Role
from pdserve.config.speculation import Speculation
from pdserve.config.tls import Tls
from pdserve.config.worker import WorkerSettings
from pdserve.engine.client import start_engine
from pdserve.engine.port import Engine, EngineInfo, EngineSpec
from pdserve.errors import ConfigError
from pdserve.fabric.native import NativeFabric
from pdserve.fabric.port import Fabric
from pdserve.ids import Incarnation, WorkerId
from pdserve.telemetry.trace import TraceBook
from pdserve.telemetry.worker_metrics import WorkerMetrics
from pdserve.text.tokenizer import Tokenizer
from pdserve.transfer.identity import Identity
from pdserve.units import div_ceil
from pdserve.wire.acceptor import Credential
from pdserve.wire.cluster import FailureKind
from pdserve.wire.connection_places import ConnectionPlaces, afford_connections
from pdserve.wire.http_listener import KEEPALIVE_TIMEOUT_S, count_requests, listening
from pdserve.wire.tls_listener import listening_in_tls
from pdserve.worker.auditor import Auditor
from pdserve.worker.captures import Captures
from pdserve.worker.connections import Connections
from pdserve.worker.core import WorkerCore
from pdserve.worker.decode_links import MAX_PEERS, DecodeLinks
from pdserve.worker.driver import Driver
from pdserve.worker.endpoints import Endpoints
from pdserve.worker.gateway_link import GatewayLink
from pdserve.worker.placement import Placement, place_ranks
from pdserve.worker.prefill_links import PrefillLinks
from pdserve.worker.stop_at import StopAt
from pdserve.worker.surroundings import EngineRegions, Surroundings

MAX_OTHER_CONNECTIONS = 128
"""On a worker's HTTP port, beside those of decode workers: probes, Prometheus, operators."""

_log = logging.getLogger(__name__)


async def run_worker(settings: WorkerSettings, *, stop: asyncio.Event, on_ready: Callable[[], None]) -> None:
    """Serve until `stop` is set, and then drain; `on_ready` is called once the gateway welcomed the worker.

    Raises: `ConfigError` when it can't start or join, `InternalError` when the engine dies, `FabricError`.
    """
    async with AsyncExitStack() as stack:
        placement = place_ranks(settings)
        engines = await _start_engines(engine_specs(settings, placement), stack, stop)
        if engines is None:
            return
        fabric = NativeFabric(settings.provider, placement.groups, device_memory=settings.device is Device.CUDA)
        stack.callback(fabric.close)
        regions = register_regions(fabric, engines, placement)
        if settings.role is Role.PREFILL:
            fabric.watch(engines[0].counter_region)
        worker = _Worker(settings, engines, fabric, regions, on_ready=on_ready)
        await worker.run(stop)


async def _start_engines(
    specs: tuple[EngineSpec, ...], stack: AsyncExitStack, stop: asyncio.Event
) -> tuple[Engine, ...] | None:
    """Engines by data parallel rank; `stack` closes them. None when the worker is stopped before all have loaded."""
    starting = [asyncio.create_task(start_engine(spec)) for spec in specs]
    stopping = asyncio.create_task(stop.wait())
    loading = asyncio.create_task(asyncio.wait(starting, return_when=asyncio.FIRST_EXCEPTION))
    try:
        await asyncio.wait({loading, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not loading.done():
            return None
        ended, _ = loading.result()
        for task in ended:
            task.result()
        return tuple(task.result() for task in starting)
    finally:
        for task in (stopping, loading, *starting):
            task.cancel()
        for engine in await asyncio.gather(*starting, return_exceptions=True):
            if not isinstance(engine, BaseException):
                stack.push_async_callback(engine.close)


def engine_specs(settings: WorkerSettings, placement: Placement) -> tuple[EngineSpec, ...]:
    """By data parallel rank, each with its share of the cores."""
    return tuple(
        EngineSpec(
            model_dir=settings.model_dir,
            num_pages=div_ceil(settings.kv_tokens, settings.page_slots),
            page_slots=settings.page_slots,
            num_tail_slots=settings.num_tail_slots,
            num_threads=settings.num_threads,
            cpus=share_of_cpus(placement.cpus, index=dp_rank, num_shares=settings.data_parallel_size),
            cuda_devices=cuda_devices_of(settings, dp_rank=dp_rank),
            tensor_parallel_size=settings.tensor_parallel_size,
            speculation=speculation_of_engine(settings.speculation),
        )
        for dp_rank in range(settings.data_parallel_size)
    )


def speculation_of_engine(speculation: Speculation | None) -> Speculation | None:
    """What the engine has to know: nothing of guesses that need no model."""
    return speculation if speculation is not None and speculation.needs_engine else None


def cuda_devices_of(settings: WorkerSettings, *, dp_rank: int) -> tuple[int, ...]:
    """Of one data parallel rank, by tensor parallel rank: CUDA's devices in the order of the worker's ranks."""
    match settings.device:
        case Device.CPU:
            return ()
        case Device.CUDA:
            num_ranks = settings.tensor_parallel_size
            return tuple(range(dp_rank * num_ranks, (dp_rank + 1) * num_ranks))


def register_regions(fabric: Fabric, engines: tuple[Engine, ...], placement: Placement) -> tuple[EngineRegions, ...]:
    """Each region with the NICs of its rank's group, by data parallel rank; tail and drafter's cache are rank 0's."""
    group_indices = iter(placement.group_indices)
    registered: list[EngineRegions] = []
    for engine in engines:
        groups = list(islice(group_indices, len(engine.kv_regions)))
        kv = tuple(
            fabric.register(region, group_index=group) for region, group in zip(engine.kv_regions, groups, strict=True)
        )
        draft_kv = engine.draft_kv_region
        registered.append(
            EngineRegions(
                kv=kv,
                draft_kv=None if draft_kv is None else fabric.register(draft_kv, group_index=groups[0]),
                tail=fabric.register(engine.tail_region, group_index=groups[0]),
            )
        )
    return tuple(registered)


def new_identity(settings: WorkerSettings, info: EngineInfo) -> Identity:
    """Of a worker that starts now."""
    return Identity(
        worker_id=WorkerId(settings.name),
        incarnation=Incarnation(secrets.randbits(63)),
        model_fingerprint=info.model_fingerprint,
        sharding=info.sharding,
        draft_layout=info.draft_layout,
        num_pages=info.num_pages,
        tail_slot_bytes=info.tail_slot_bytes,
    )


class _Worker:
    """Everything between the engine and the sockets; lives as long as `run`."""

    def __init__(
        self,
        settings: WorkerSettings,
        engines: tuple[Engine, ...],
        fabric: Fabric,
        regions: tuple[EngineRegions, ...],
        *,
        on_ready: Callable[[], None],
    ) -> None:
        """`engines` and their `regions` by data parallel rank."""
        self._settings = settings
        self._engines = engines
        self._fabric = fabric
        self._on_ready = on_ready
        clock = SystemClock()
        identity = new_identity(settings, engines[0].info)
        self._connections = Connections(incarnation=identity.incarnation, clock=clock)
        captures = Captures(engines) if settings.capture_kv else None
        core = WorkerCore(self._surroundings(identity, regions, captures))
        self._metrics = metrics = WorkerMetrics(model_name=settings.model_name)
        traces = TraceBook()
        stop_at = StopAt(core) if settings.allow_stop_at else None
        self._driver = Driver(
            core=core,
            engines=engines,
            fabric=fabric,
            clock=clock,
            metrics=metrics,
            traces=traces,
            stop_at=stop_at,
        )
        self._auditor = Auditor(core=core, clock=clock, metrics=metrics, connected_since_ns=self._connections.since_ns)
        self._endpoints = Endpoints(
            settings=settings,
            driver=self._driver,
            metrics=metrics,
            traces=traces,
            captures=captures,
            auditor=self._auditor,
            stop_at=stop_at,
        )

    def _surroundings(
        self, identity: Identity, regions: tuple[EngineRegions, ...], captures: Captures | None
    ) -> Surroundings:
        return Surroundings(
            settings=self._settings,
            identity=identity,
            engine=self._engines[0].info,
            tokenizer=Tokenizer.load(Path(self._settings.model_dir)),
            fabric=self._fabric,
            regions=regions,
            outbox=self._connections,
            drop_peer=self._connections.drop,
            on_prefilled=captures.capture if captures is not None else None,
        )

    async def run(self, stop: asyncio.Event) -> None:
        loop = asyncio.get_running_loop()
        loop.add_reader(self._fabric.fileno(), self._driver.on_fabric_readable)
        loop.add_signal_handler(signal.SIGUSR1, self._auditor.dump)
        try:
            async with self._serve_http() as url, aiohttp.ClientSession() as session:
                await self._run_tasks(url, session, stop)
        finally:
            loop.remove_signal_handler(signal.SIGUSR1)
            loop.remove_reader(self._fabric.fileno())

    async def _run_tasks(self, url: str, session: aiohttp.ClientSession, stop: asyncio.Event) -> None:
        """Run until drained after `stop`, or until a part fails; then end what is open, and everything that runs."""
        links = self._prefill_links(session)
        gateway = GatewayLink(
            settings=self._settings,
            engine=self._engines[0].info,
            url=url,
            driver=self._driver,
            prefill_links=links,
            session=session,
            on_joined=self._joined,
        )
        stopping = asyncio.create_task(self._drain_after(stop))
        passes = {asyncio.create_task(self._driver.run_passes(dp_rank)) for dp_rank in range(len(self._engines))}
        failures = {asyncio.create_task(engine.wait_failed()) for engine in self._engines}
        services = (self._driver.run_time(), self._auditor.run(), gateway.run())
        tasks = {stopping, *passes, *failures, *map(asyncio.create_task, services)}
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if done & (passes | failures):
                gateway.cut()
            else:
                self._fail_all()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            if links is not None:
                await links.close()
        for task in done - {stopping}:
            task.result()

    def _fail_all(self) -> None:
        with self._driver.event() as now_ns:
            kind = FailureKind.SHUTTING_DOWN
            self._driver.core.fail_all(kind, f"worker {self._settings.name} stops", now_ns=now_ns)

    async def _drain_after(self, stop: asyncio.Event) -> None:
        """Return after `stop`, when nothing is left here or the drain timeout is over."""
        await stop.wait()
        core, timeout_s = self._driver.core, self._settings.drain_timeout_s
        _log.info("drain_started num_open=%d timeout_s=%g", core.num_open, timeout_s)
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._driver.drain()
        if core.num_open:
            _log.warning("drain_cut num_open=%d timeout_s=%g", core.num_open, timeout_s)

    def _prefill_links(self, session: aiohttp.ClientSession) -> PrefillLinks | None:
        receiver = self._driver.core.receiver
        if receiver is None:
            return None
        return PrefillLinks(
            settings=self._settings,
            driver=self._driver,
            receiver=receiver,
            fabric=self._fabric,
            connections=self._connections,
            session=session,
        )

    @asynccontextmanager
    async def _serve_http(self) -> AsyncGenerator[str]:
        """The worker's HTTP server; yields the URL for its peers. Raises: `ConfigError` when it can't listen."""
        app = web.Application(middlewares=[count_requests])
        app.add_routes(self._endpoints.routes())
        sender = self._driver.core.sender
        if sender is not None:
            links = DecodeLinks(
                settings=self._settings,
                driver=self._driver,
                sender=sender,
                fabric=self._fabric,
                connections=self._connections,
                metrics=self._metrics,
            )
            app.router.add_get("/peer", links.handle)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0, keepalive_timeout=KEEPALIVE_TIMEOUT_S)
        await runner.setup()
        try:
            async with self._listen(runner) as url:
                if self._settings.tls is None:
                    yield url
                else:
                    async with self._listen_in_tls(runner, self._settings.tls) as tls_url:
                        yield tls_url
        finally:
            await runner.cleanup()

    @asynccontextmanager
    async def _listen(self, runner: web.AppRunner) -> AsyncGenerator[str]:
        host, port = self._settings.host, self._settings.port
        places = ConnectionPlaces(
            max_connections=afford_connections(MAX_PEERS + MAX_OTHER_CONNECTIONS),
            on_ended=lambda ending: self._metrics.connections.observe(ending.value),
        )
        async with AsyncExitStack() as stack:
            try:
                port = await stack.enter_async_context(listening(runner, host, port, places))
            except (OSError, OverflowError) as error:
                raise self._unusable(port, error) from error
            yield f"http://{host}:{port}"

    @asynccontextmanager
    async def _listen_in_tls(self, runner: web.AppRunner, tls: Tls) -> AsyncGenerator[str]:
        host, port = self._settings.host, self._settings.control_port
        async with AsyncExitStack() as stack:
            listener = listening_in_tls(
                runner,
                host,
                port,
                tls.listener,
                on_refused=lambda: self._metrics.observe_authentication_refused(Credential.CERTIFICATE.value),
            )
            try:
                port = await stack.enter_async_context(listener)
            except OSError as error:
                raise self._unusable(port, error) from error
            yield f"https://{host}:{port}"

    def _unusable(self, port: int, error: OSError | OverflowError) -> ConfigError:
        return ConfigError(f"worker {self._settings.name} can't listen on {self._settings.host}:{port}: {error}")

    def _joined(self) -> None:
        self._endpoints.is_ready = True
        self._on_ready()
