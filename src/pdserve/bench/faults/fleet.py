"""Real gateways and workers on this machine, each of which can be killed, frozen and started again at its address.

Unlike `launch.deployment`, which starts all, watches all and stops all, a fleet lets each process come and go.
"""

import asyncio
import random
import signal
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from pdserve.bench.exposition import metric_total
from pdserve.bench.procfs import process_stat
from pdserve.bench.waiting import until
from pdserve.config.deployment import WorkerPlace
from pdserve.config.environment import cluster_secret
from pdserve.config.role import Role
from pdserve.errors import ConfigError
from pdserve.launch.arguments import gateway_arguments, worker_arguments
from pdserve.launch.child import Child
from pdserve.launch.deployment import require_free_port
from pdserve.wire.bearer import bearer_headers

GATEWAY = "gateway"

PORTS = range(20_000, 32_000)
"""Below Linux's default range for outgoing connections, 32,768 to 60,999."""

START_TIMEOUT_S = 300.0
"""Several fleets may load a model at once, on a machine that does other things too."""

CONNECT_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 10.0
IDLE_TIMEOUT_S = 30.0
"""For everything to be given back: a fence takes about a second, an unanswered cancel ten."""

ASK_TIMEOUT_S = 5.0
"""For one look at a process. One that is frozen answers nobody."""

LEAKED_METRIC = "pdserve:ledger_leaked"


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Where a member runs."""

    host: str = "127.0.0.1"
    """The address that it listens on."""
    wrapper: tuple[str, ...] = ()
    """A command that starts it there, such as `ip netns exec NAME`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSettings:
    model_dir: str
    model_name: str
    places: tuple[WorkerPlace, ...]
    worker_arguments: tuple[str, ...] = ()
    """Flags of `pdserve worker` for every worker."""
    gateway_arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    sites: Mapping[str, Site] = field(default_factory=dict[str, Site])
    """By name, `gateway` among them; the others are on loopback."""


@dataclass(slots=True, kw_only=True)
class _Member:
    """One process, or the place of one that is to be started again."""

    name: str
    role: Role | None
    """None: the gateway."""
    url: str
    arguments: tuple[str, ...]
    wrapper: tuple[str, ...]
    child: Child | None = None
    was_ended: bool = False
    """By us."""


class Fleet:
    """Names are `gateway` and those of the places. Threads: the event loop's only. Use `running_fleet`."""

    def __init__(self, settings: FleetSettings, session: aiohttp.ClientSession) -> None:
        self._settings = settings
        self._session = session
        self._members: dict[str, _Member] = {}
        ports = _free_ports(1 + len(settings.places))
        self._add_gateway(ports[0])
        for place, port in zip(settings.places, ports[1:], strict=True):
            self._add_worker(place, port)

    # What there is

    @property
    def url(self) -> str:
        """The gateway's, the same for every gateway that is started."""
        return self._members[GATEWAY].url

    @property
    def names(self) -> tuple[str, ...]:
        """Of all members, running or not."""
        return tuple(self._members)

    def workers(self, role: Role | None = None) -> tuple[str, ...]:
        """Names of the workers of a role, or of all."""
        return tuple(
            name
            for name, member in self._members.items()
            if member.role is not None and (role is None or member.role is role)
        )

    def is_running(self, name: str) -> bool:
        """Frozen ones run too."""
        child = self._members[name].child
        return child is not None and child.process.returncode is None

    def pid(self, name: str) -> int:
        """Of the process itself; a worker's ranks are its children. Raises: `ConfigError` when it does not run."""
        child = self._members[name].child
        if child is None or child.process.returncode is not None:
            raise ConfigError(f"{name} does not run")
        return child.process.pid

    @property
    def ended_by_themselves(self) -> list[str]:
        """What became of members that nobody ended."""
        return [
            f"{name} ended by itself with exit status {member.child.process.returncode}"
            for name, member in self._members.items()
            if member.child is not None and member.child.process.returncode is not None and not member.was_ended
        ]

    def is_frozen(self, name: str) -> bool:
        """Whether the process stands still by SIGSTOP, its own or another's."""
        if not self.is_running(name):
            return False
        stat = process_stat(self.pid(name))
        return stat is not None and stat.state == "T"

    # What is done to it

    async def start(self, name: str) -> None:
        """Start a member that does not run, at the address that it always has. Returns when it is ready.

        Raises: `ConfigError` when it does not start.
        """
        member = self._members[name]
        member.was_ended = False
        member.child = await Child.start(
            name, member.arguments, environment=dict(self._settings.environment), wrapper=member.wrapper
        )
        await member.child.wait_ready(timeout_s=START_TIMEOUT_S)

    async def kill(self, name: str) -> None:
        """End a process without a word, as the kernel would. Nothing when it does not run."""
        member = self._members[name]
        child, member.was_ended = member.child, True
        if child is not None:
            child.signal(signal.SIGKILL)
            await child.stop(timeout_s=STOP_TIMEOUT_S)

    async def stop(self, name: str, *, timeout_s: float = STOP_TIMEOUT_S) -> int | None:
        """Ask a process to drain and end; insist after a while. Its exit status, None when it was never started."""
        member = self._members[name]
        child, member.was_ended = member.child, True
        if child is None:
            return None
        child.signal(signal.SIGCONT)
        await child.stop(timeout_s=timeout_s)
        return child.process.returncode

    def freeze(self, name: str) -> None:
        """SIGSTOP: its connections stay open, and it says nothing."""
        self._signal(name, signal.SIGSTOP)

    def thaw(self, name: str) -> None:
        self._signal(name, signal.SIGCONT)

    async def start_missing(self) -> None:
        """Thaw and start what must be, so that every member runs; the gateway first, since workers join it."""
        for name in self.names:
            if self.is_frozen(name):
                self.thaw(name)
        if not self.is_running(GATEWAY):
            await self.start(GATEWAY)
        await asyncio.gather(*(self.start(name) for name in self.workers() if not self.is_running(name)))

    async def stop_all(self) -> None:
        """Workers first, then the gateway; whatever state they are in."""
        await asyncio.gather(*(self.stop(name) for name in self.workers()))
        await self.stop(GATEWAY)

    # What it says

    async def listed_workers(self) -> dict[str, dict[str, Any]]:
        """`GET /workers` of the gateway, by worker id."""
        return {worker["worker_id"]: worker for worker in (await self._get_json(GATEWAY, "/workers"))["workers"]}

    async def ledger(self, name: str) -> dict[str, Any]:
        """`GET /debug/ledger` of a worker or the gateway."""
        return await self._get_json(name, "/debug/ledger")

    async def metric(self, name: str, metric: str, **labels: str) -> float:
        """The sum of a metric's samples with these labels, of a worker or the gateway; 0 when there is none."""
        async with self._session.get(f"{self._members[name].url}/metrics") as response:
            return metric_total(await response.text(), metric, **labels)

    async def stop_at(self, name: str, state: str) -> None:
        """Have a worker with `--allow-stop-at` freeze itself when a handoff enters the state.

        Raises: `ConfigError` when it refuses.
        """
        await self._require("PUT", name, f"/debug/stop-at/{state}")

    async def never_stop(self, name: str) -> None:
        """Take back a `stop_at` that has not come about."""
        await self._require("DELETE", name, "/debug/stop-at")

    async def until_connected(self, *, timeout_s: float = CONNECT_TIMEOUT_S) -> None:
        """Wait until the gateway lists every worker, and each decode worker is connected to each prefill worker that
        is listed, not to one before it. Raises: `TimeoutError`."""
        await until(self._is_connected, bool, timeout_s=timeout_s)

    async def until_idle(self, *, timeout_s: float = IDLE_TIMEOUT_S) -> list[str]:
        """Wait until no process that runs holds anything, and nothing leaked (rule H7); what is left after the timeout
        is returned, so an empty list is good."""
        left = ["nobody has shown a ledger in time"]

        async def look() -> list[str]:
            nonlocal left
            left = await self.holdings()
            return left

        try:
            return await until(look, lambda holdings: not holdings, timeout_s=timeout_s)
        except TimeoutError:
            return left

    async def holdings(self) -> list[str]:
        """What any process that runs holds or has leaked, in words."""
        found: list[str] = []
        for name in filter(self.is_running, self.names):
            try:
                ledger, num_leaked = await self.ledger(name), await self.metric(name, LEAKED_METRIC)
            except (aiohttp.ClientError, TimeoutError) as error:
                found.append(f"{name} does not show its ledger: {error!r}")
                continue
            found += [f"{name}: {what}" for what in _held(ledger)]
            if num_leaked:
                found.append(f"{name}: {LEAKED_METRIC} is {num_leaked:g}")
        return found

    async def _is_connected(self) -> bool:
        try:
            listed = await self.listed_workers()
            if listed.keys() != set(self.workers()):
                return False
            prefill = {listed[name]["incarnation"] for name in self.workers(Role.PREFILL)}
            for name in self.workers(Role.DECODE):
                sessions = (await self.ledger(name))["sessions"]
                connected = {each["incarnation"] for each in sessions if each["phase"] == "connected"}
                if connected != prefill or listed[name]["num_prefill_peers"] != len(prefill):
                    return False
        except (aiohttp.ClientError, TimeoutError):
            return False
        return True

    async def _require(self, method: str, name: str, path: str) -> None:
        async with self._session.request(method, self._members[name].url + path) as response:
            if response.status != 200:
                raise ConfigError(f"{name} refuses {path}: {response.status} {(await response.text()).strip()}")

    def _signal(self, name: str, number: signal.Signals) -> None:
        child = self._members[name].child
        if child is not None:
            child.signal(number)

    async def _get_json(self, name: str, path: str) -> dict[str, Any]:
        async with self._session.get(self._members[name].url + path) as response:
            response.raise_for_status()
            return await response.json()

    def _add_gateway(self, port: int) -> None:
        settings = self._settings
        site = settings.sites.get(GATEWAY, Site())
        arguments = gateway_arguments(
            model_dir=settings.model_dir,
            model_name=settings.model_name,
            host=site.host,
            port=port,
            cpus=(),
            drain_timeout_s=0.0,
        )
        self._members[GATEWAY] = _Member(
            name=GATEWAY,
            role=None,
            url=f"http://{site.host}:{port}",
            arguments=(*arguments, *settings.gateway_arguments),
            wrapper=site.wrapper,
        )

    def _add_worker(self, place: WorkerPlace, port: int) -> None:
        settings = self._settings
        site = settings.sites.get(place.name, Site())
        arguments = worker_arguments(
            place,
            model_dir=settings.model_dir,
            model_name=settings.model_name,
            join_url=self.url,
            drain_timeout_s=0.0,
        )
        self._members[place.name] = _Member(
            name=place.name,
            role=place.role,
            url=f"http://{site.host}:{port}",
            arguments=(*arguments, "--host", site.host, "--port", str(port), *settings.worker_arguments),
            wrapper=site.wrapper,
        )


@asynccontextmanager
async def running_fleet(
    settings: FleetSettings, *, on_progress: Callable[[str], None] = lambda _: None
) -> AsyncGenerator[Fleet]:
    """All members started and connected; all of them gone at the end. Raises: `ConfigError` when one does not start."""
    headers = bearer_headers(cluster_secret())
    timeout = aiohttp.ClientTimeout(total=ASK_TIMEOUT_S)
    async with aiohttp.ClientSession(headers=headers, timeout=timeout) as session:
        fleet = Fleet(settings, session)
        try:
            await fleet.start_missing()
            await fleet.until_connected()
            on_progress(f"{len(fleet.names)} processes run: {', '.join(fleet.names)}")
            yield fleet
        finally:
            await fleet.stop_all()


def _free_ports(count: int) -> list[int]:
    """Different ones. No outgoing connection gets one of them, not even while its member is away.

    Raises: `ConfigError` when there are not so many.
    """
    ports: list[int] = []
    for port in random.sample(PORTS, len(PORTS)):
        if len(ports) == count:
            return ports
        try:
            ports.append(require_free_port("127.0.0.1", port))
        except ConfigError:
            continue
    raise ConfigError(f"fewer than {count} ports from {PORTS.start} to {PORTS.stop - 1} are free; end what uses them")


def _held(ledger: Mapping[str, Any]) -> list[str]:
    """What a ledger lists: of a worker its owners, of a gateway its requests; and leaks of either."""
    owners = [owner for rank in ledger.get("ranks", ()) for owner in rank["owners"]]
    return [
        *(f"{owner['owner']} is {owner['phase']}" for owner in owners),
        *(f"request {request['request_id']} is {request['phase']}" for request in ledger.get("requests", ())),
        *(f"leaked {leak['kind']}: {leak['message']}" for leak in ledger["leaks"]),
    ]
