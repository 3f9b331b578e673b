"""The decode side's connections: one to each prefill worker that the gateway names, kept as long as it is named."""

import asyncio
import logging

import aiohttp

from pdserve.config.worker import WorkerSettings
from pdserve.errors import LayoutMismatch, PdserveError, PeerLost
from pdserve.fabric.port import Fabric
from pdserve.ids import Incarnation
from pdserve.transfer.receiver import Receiver
from pdserve.wire.channel import Channel, dial
from pdserve.wire.cluster import PrefillTarget
from pdserve.wire.codec import decode_side_codec
from pdserve.wire.peer import GrantRefused, HandoffStopped, PeerHello, PrefillToDecode
from pdserve.worker.connections import Connections, serve_peer
from pdserve.worker.driver import Driver
from pdserve.worker.handshake import await_acceptance, hear, hello

_log = logging.getLogger(__name__)

DIAL_TIMEOUT_S = 5.0
RETRY_S = 1.0
"""Between two attempts to reach a prefill worker; its requests prefill locally meanwhile."""


class PrefillLinks:
    """Threads: the event loop's only. Lifetime: `close` ends every connection."""

    def __init__(
        self,
        *,
        settings: WorkerSettings,
        driver: Driver,
        receiver: Receiver,
        fabric: Fabric,
        connections: Connections,
        session: aiohttp.ClientSession,
    ) -> None:
        self._settings = settings
        self._driver = driver
        self._receiver = receiver
        self._fabric = fabric
        self._connections = connections
        self._session = session
        self._tasks: dict[Incarnation, asyncio.Task[None]] = {}

    def set_members(self, members: tuple[PrefillTarget, ...]) -> None:
        """Follow the gateway's view: connect to new members, leave those that are gone."""
        wanted = {target.incarnation: target for target in members}
        for incarnation in self._tasks.keys() - wanted.keys():
            self._tasks.pop(incarnation).cancel()
        for incarnation in wanted.keys() - self._tasks.keys():
            self._tasks[incarnation] = asyncio.create_task(self._keep(wanted[incarnation]))

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        self.set_members(())
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _keep(self, target: PrefillTarget) -> None:
        """Connect again and again, each time only after the last session of the same incarnation is fenced (H2)."""
        while True:
            if self._receiver.can_join(target.incarnation):
                try:
                    await self._connect_once(target)
                except LayoutMismatch as error:
                    _log.error("handshake_refused peer=%s reason=%r", target.worker_id, error.message)
                    return
                except PdserveError as error:
                    _log.warning("peer_unreachable peer=%s reason=%r", target.worker_id, error.message)
            await asyncio.sleep(RETRY_S)

    async def _connect_once(self, target: PrefillTarget) -> None:
        channel = await dial(
            self._session,
            f"{target.url}/peer",
            decode_side_codec(),
            secret=self._settings.secret,
            timeout_s=DIAL_TIMEOUT_S,
            tls=self._settings.tls and self._settings.tls.dialler,
        )
        try:
            theirs = await self._shake_hands(channel, target)
            _log.info("peer_joined peer=%s", theirs.worker_id)
            self._connections.add(theirs.incarnation, channel)
            await serve_peer(
                self._connections,
                channel,
                peer=theirs.incarnation,
                heartbeat_s=self._settings.heartbeat_s,
                lease_s=theirs.lease_s,
                on_message=lambda message: self._on_message(theirs.incarnation, message),
            )
        finally:
            self._connections.remove(target.incarnation)
            self._driver.peer_lost(target.incarnation)
            await channel.close()

    async def _shake_hands(self, channel: Channel[PrefillToDecode], target: PrefillTarget) -> PeerHello:
        core = self._driver.core
        theirs = await hear(channel, core.identity, self._fabric, timeout_s=DIAL_TIMEOUT_S)
        if theirs.incarnation != target.incarnation:
            raise PeerLost("it was restarted since the gateway named it", peer=theirs.worker_id)
        regions = self._receiver.expose()
        try:
            channel.send(hello(core.identity, self._settings, self._fabric, regions=regions))
            await await_acceptance(channel, timeout_s=DIAL_TIMEOUT_S)
        except BaseException:
            self._receiver.withdraw(regions)
            raise
        with self._driver.event():
            self._driver.status_changed.set()
            self._receiver.peer_joined(
                worker_id=theirs.worker_id, incarnation=theirs.incarnation, sharding=theirs.sharding, regions=regions
            )
        return theirs

    def _on_message(self, peer: Incarnation, message: PrefillToDecode) -> None:
        if isinstance(message, GrantRefused | HandoffStopped):
            with self._driver.event() as now_ns:
                self._receiver.on_message(peer, message, now_ns=now_ns)
                self._driver.core.advance(now_ns=now_ns)
