"""The worker's connection to its gateway: join, heartbeats, requests in, deltas out; again after each loss."""

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress

import aiohttp

from pdserve.config.worker import WorkerSettings
from pdserve.engine.port import EngineInfo
from pdserve.errors import AuthenticationError, ConfigError, PdserveError, PeerLost, RemoteProtocolError
from pdserve.wire.channel import Channel, dial
from pdserve.wire.cluster import (
    Abort,
    GatewayHeartbeat,
    GatewayToWorker,
    Generate,
    Join,
    JoinRefused,
    Leave,
    PrefillPool,
    Welcome,
    WorkerHeartbeat,
)
from pdserve.wire.codec import worker_codec
from pdserve.wire.peer import PROTOCOL_VERSION, Message
from pdserve.worker.connections import receive_within
from pdserve.worker.driver import Driver
from pdserve.worker.prefill_links import PrefillLinks

_log = logging.getLogger(__name__)

DIAL_TIMEOUT_S = 5.0
RETRY_S = 0.5


class GatewayLink:
    """Threads: the event loop's only."""

    def __init__(
        self,
        *,
        settings: WorkerSettings,
        engine: EngineInfo,
        url: str,
        driver: Driver,
        prefill_links: PrefillLinks | None,
        session: aiohttp.ClientSession,
        on_joined: Callable[[], None],
    ) -> None:
        """`url` is where other workers reach this one; `on_joined` is called at each welcome."""
        self._settings = settings
        self._engine = engine
        self._url = url
        self._driver = driver
        self._prefill_links = prefill_links
        self._session = session
        self._on_joined = on_joined
        self._heartbeat_s = settings.heartbeat_s
        self._channel: Channel[GatewayToWorker] | None = None

    async def run(self) -> None:
        """Keep the connection.

        Raises: `ConfigError` when the first join is refused or does not succeed in `join_timeout_s`.
        """
        channel = await self._join_first()
        while True:
            await self._serve(channel)
            channel = await self._join_again()

    def cut(self) -> None:
        """End the connection without a word: to the gateway this worker is lost, and its answers go on from another."""
        if self._channel is not None:
            self._channel.abort()

    async def _join_first(self) -> Channel[GatewayToWorker]:
        give_up_at = time.monotonic() + self._settings.join_timeout_s
        while True:
            try:
                return await self._join()
            except AuthenticationError as error:
                raise ConfigError(error.message) from error
            except PdserveError as error:
                if isinstance(error, ConfigError) or time.monotonic() >= give_up_at:
                    raise ConfigError(
                        f"can't join the gateway at {self._settings.join_url}: {error.message}"
                    ) from error
            await asyncio.sleep(RETRY_S)

    async def _join_again(self) -> Channel[GatewayToWorker]:
        while True:
            try:
                return await self._join()
            except PdserveError as error:
                _log.warning("join_failed gateway=%s reason=%r", self._settings.join_url, error.message)
            await asyncio.sleep(RETRY_S)

    async def _join(self) -> Channel[GatewayToWorker]:
        """Raises: `PeerLost` when the gateway can't be reached, `ConfigError` when it refuses."""
        settings, identity, engine = self._settings, self._driver.core.identity, self._engine
        channel = await dial(
            self._session,
            f"{settings.join_url}/cluster",
            worker_codec(),
            secret=settings.secret,
            timeout_s=DIAL_TIMEOUT_S,
            tls=settings.tls and settings.tls.dialler,
        )
        join = Join(
            protocol_version=PROTOCOL_VERSION,
            worker_id=identity.worker_id,
            incarnation=identity.incarnation,
            role=settings.role,
            url=self._url,
            model_name=settings.model_name,
            model_fingerprint=identity.model_fingerprint,
            max_model_len=min(engine.max_model_len, engine.num_pages * engine.sharding.layout.page_slots),
            lease_s=settings.lease_s,
            tensor_parallel_size=engine.sharding.num_ranks,
            loads=self._driver.core.loads(),
        )
        try:
            channel.send(join)
            answer = await receive_within(channel, timeout_s=DIAL_TIMEOUT_S)
            match answer:
                case Welcome():
                    self._heartbeat_s = answer.heartbeat_s
                case JoinRefused():
                    raise ConfigError(f"it refuses this worker: {answer.message}")
                case _:
                    raise RemoteProtocolError(f"{type(answer).__name__} instead of a welcome", peer=channel.peer)
        except BaseException:
            channel.abort()
            raise
        return channel

    async def _serve(self, channel: Channel[GatewayToWorker]) -> None:
        """Serve until the connection ends; then nobody wants the requests that came over it."""
        self._channel = channel
        self._driver.to_gateway = lambda message: self._send(channel, message)
        self._on_joined()
        self._driver.status_changed.set()
        beats = asyncio.create_task(self._beat(channel))
        try:
            while True:
                self._on_message(await receive_within(channel, timeout_s=self._settings.lease_s))
        except PdserveError as error:
            _log.warning("gateway_lost gateway=%s reason=%r", self._settings.join_url, error.message)
        finally:
            beats.cancel()
            self._send(channel, Leave(sender=self._driver.core.identity.incarnation))
            self._driver.to_gateway = None
            with self._driver.event() as now_ns:
                self._driver.core.abort_all(now_ns=now_ns)
            await channel.close()

    async def _beat(self, channel: Channel[GatewayToWorker]) -> None:
        """A heartbeat whenever one is due, and at once when there is news, as after each join."""
        identity, changed = self._driver.core.identity, self._driver.status_changed
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(changed.wait(), self._heartbeat_s)
            changed.clear()
            core = self._driver.core
            beat = WorkerHeartbeat(
                sender=identity.incarnation,
                loads=core.loads(),
                num_prefill_peers=core.num_prefill_peers,
                draining=core.is_draining,
            )
            self._send(channel, beat)

    def _send(self, channel: Channel[GatewayToWorker], message: Message) -> None:
        try:
            channel.send(message)
        except PeerLost as error:
            _log.debug("send_failed gateway=%s reason=%r", self._settings.join_url, error.message)

    def _on_message(self, message: GatewayToWorker) -> None:
        core = self._driver.core
        match message:
            case Generate() | Abort() if message.receiver != core.identity.incarnation:
                self._driver.num_stale_from_gateway += 1
                _log.warning("stale_message gateway=%s request_id=%s", self._settings.join_url, message.request_id)
            case Generate():
                self._driver.on_generate(message)
            case Abort():
                with self._driver.event() as now_ns:
                    core.on_abort(message.request_id, now_ns=now_ns)
            case PrefillPool() if self._prefill_links is not None:
                self._prefill_links.set_members(message.members)
            case Welcome() | JoinRefused() | GatewayHeartbeat() | PrefillPool():
                pass
