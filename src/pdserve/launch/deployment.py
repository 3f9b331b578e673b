"""A gateway and workers on this machine, as one thing that starts, runs and stops."""

import asyncio
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType

import aiohttp

from pdserve.config.deployment import WorkerPlace
from pdserve.config.environment import cluster_secret
from pdserve.config.role import Role
from pdserve.errors import ConfigError, InternalError
from pdserve.launch.arguments import gateway_arguments, worker_arguments
from pdserve.launch.child import Child
from pdserve.wire.bearer import bearer_headers

START_TIMEOUT_S = 120.0
"""Loading a small model takes seconds; a cold disk and a busy machine take more."""

CONNECT_TIMEOUT_S = 30.0
CONNECT_POLL_S = 0.05

STOP_TIMEOUT_S = 10.0
"""For a process to end, beyond the time that it has to drain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentSettings:
    model_dir: str
    model_name: str
    places: tuple[WorkerPlace, ...]
    host: str = "127.0.0.1"
    port: int = 0
    """0: any free one."""
    worker_arguments: tuple[str, ...] = ()
    """Flags of `pdserve worker` for every worker."""
    gateway_arguments: tuple[str, ...] = ()
    """Flags of `pdserve gateway`."""
    tls_arguments: tuple[str, ...] = ()
    """Flags of both for TLS on control connections; none: they are plain."""
    drain_timeout_s: float = 0.0
    """For each process to finish what runs when the deployment stops; 0: none, as fits where nobody waits."""
    environment: dict[str, str] = field(default_factory=dict[str, str], repr=False)


def require_free_port(host: str, port: int) -> int:
    """The port, or a free one for 0. Raises: `ConfigError` when it is taken or the address is not ours."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno else str(error)
            raise ConfigError(f"can't listen on {host}:{port}: {reason}; choose another with --port") from error
        return probe.getsockname()[1]


class LocalDeployment:
    """`async with LocalDeployment(settings) as deployment`: started on entry, stopped whole on exit."""

    def __init__(self, settings: DeploymentSettings, *, on_progress: Callable[[str], None] = lambda _: None) -> None:
        self._settings = settings
        self._on_progress = on_progress
        self._children: list[Child] = []
        self.url = ""
        self._join_url = ""

    async def __aenter__(self) -> "LocalDeployment":
        """Raises: `ConfigError` when something does not start; nothing is left running then."""
        settings = self._settings
        port = require_free_port(settings.host, settings.port)
        self.url = self._join_url = f"http://{settings.host}:{port}"
        try:
            await self._start_all(port)
        except BaseException:
            await self._stop_all()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._stop_all()

    async def watch(self) -> None:
        """Return never; raise `InternalError` when a process ends by itself."""
        waits = {asyncio.create_task(child.process.wait()): child for child in self._children}
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        task = done.pop()
        raise InternalError(f"{waits[task].name} ended by itself with exit status {task.result()}")

    def child(self, name: str) -> Child:
        """The process of a worker by its name, or `gateway`."""
        return next(child for child in self._children if child.name == name)

    async def _start_all(self, port: int) -> None:
        settings = self._settings
        gateway = await self._start("gateway", self._gateway_arguments(port))
        await gateway.wait_ready(timeout_s=START_TIMEOUT_S)
        self._on_progress(f"gateway listens on {self.url}")
        workers = [await self._start(place.name, self._worker_arguments(place)) for place in settings.places]
        for place, worker in zip(settings.places, workers, strict=True):
            await worker.wait_ready(timeout_s=START_TIMEOUT_S)
            cores = f"cores {','.join(map(str, place.cpus))}" if place.cpus else "not pinned"
            self._on_progress(f"{place.name} is ready ({place.role.value}, {cores})")
        await self._wait_connected()

    async def _wait_connected(self) -> None:
        """Until every decode worker is connected to every prefill worker: before, prompts are prefilled locally."""
        num_prefill = sum(place.role is Role.PREFILL for place in self._settings.places)
        headers = bearer_headers(cluster_secret())
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S), aiohttp.ClientSession(headers=headers) as session:
                while True:
                    async with session.get(f"{self.url}/workers") as response:
                        workers = (await response.json())["workers"]
                    decoders = [worker for worker in workers if worker["role"] == Role.DECODE.value]
                    if all(worker["num_prefill_peers"] == num_prefill for worker in decoders):
                        return
                    await asyncio.sleep(CONNECT_POLL_S)
        except TimeoutError as error:
            raise ConfigError(
                f"decode and prefill workers did not connect within {CONNECT_TIMEOUT_S:g} s; see their messages above"
            ) from error

    async def _start(self, name: str, arguments: Sequence[str]) -> Child:
        child = await Child.start(name, arguments, environment=self._settings.environment)
        self._children.append(child)
        return child

    def _gateway_arguments(self, port: int) -> tuple[str, ...]:
        """On the cores of the prefill workers, if there are any: there a late turn delays one prompt a little, on a
        decode worker's core it delays a token of every stream."""
        settings = self._settings
        cpus = sorted({cpu for place in settings.places if place.role is Role.PREFILL for cpu in place.cpus})
        shared = gateway_arguments(
            model_dir=settings.model_dir,
            model_name=settings.model_name,
            host=settings.host,
            port=port,
            cpus=cpus,
            drain_timeout_s=settings.drain_timeout_s,
        )
        arguments = (*shared, *settings.gateway_arguments)
        if not settings.tls_arguments:
            return arguments
        control_port = require_free_port(settings.host, 0)
        self._join_url = f"https://{settings.host}:{control_port}"
        return (*arguments, *settings.tls_arguments, "--control-port", str(control_port))

    def _worker_arguments(self, place: WorkerPlace) -> tuple[str, ...]:
        settings = self._settings
        shared = worker_arguments(
            place,
            model_dir=settings.model_dir,
            model_name=settings.model_name,
            join_url=self._join_url,
            drain_timeout_s=settings.drain_timeout_s,
        )
        return (*shared, *settings.worker_arguments, *settings.tls_arguments)

    async def _stop_all(self) -> None:
        """Workers first, so that they can finish and say goodbye, then the gateway, which has nothing left then."""
        children, self._children = self._children, []
        gateways, workers = children[:1], children[1:]
        timeout_s = self._settings.drain_timeout_s + STOP_TIMEOUT_S
        await asyncio.gather(*(worker.stop(timeout_s=timeout_s) for worker in workers))
        await asyncio.gather(*(gateway.stop(timeout_s=timeout_s) for gateway in gateways))
