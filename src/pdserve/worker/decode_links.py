"""The prefill side's connections: decode workers dial `/peer`, shake hands, and send grants."""

import logging

from aiohttp import web

from pdserve.config.worker import WorkerSettings
from pdserve.errors import FabricError, PdserveError, RemoteProtocolError
from pdserve.fabric.port import Fabric
from pdserve.ids import Incarnation
from pdserve.telemetry.worker_metrics import WorkerMetrics
from pdserve.transfer.sender import Sender
from pdserve.wire.acceptor import Acceptor
from pdserve.wire.channel import Channel
from pdserve.wire.codec import prefill_side_codec
from pdserve.wire.peer import Cancel, DecodeToPrefill, Grant, Heartbeat, PeerHello, PeerRefused
from pdserve.worker.connections import Connections, serve_peer
from pdserve.worker.driver import Driver
from pdserve.worker.handshake import hear, hello

_log = logging.getLogger(__name__)

HELLO_TIMEOUT_S = 5.0
MAX_PEERS = 1024
"""Connections with decode workers, half-open ones included (H6)."""


class DecodeLinks:
    """The handler of `GET /peer` on a worker that prefills."""

    def __init__(
        self,
        *,
        settings: WorkerSettings,
        driver: Driver,
        sender: Sender,
        fabric: Fabric,
        connections: Connections,
        metrics: WorkerMetrics,
    ) -> None:
        self._settings = settings
        self._driver = driver
        self._sender = sender
        self._fabric = fabric
        self._connections = connections
        self._acceptor = Acceptor(
            prefill_side_codec(),
            secret=settings.secret,
            max_connections=MAX_PEERS,
            needs_tls=settings.tls is not None,
            on_refused=lambda credential: metrics.observe_authentication_refused(credential.value),
        )

    async def handle(self, request: web.Request) -> web.StreamResponse:
        return await self._acceptor.accept(request, self._serve)

    async def _serve(self, channel: Channel[DecodeToPrefill]) -> None:
        try:
            await self._serve_peer(channel)
        except PdserveError as error:
            _log.warning("peer_refused peer=%s reason=%r", channel.peer, error.message)

    async def _serve_peer(self, channel: Channel[DecodeToPrefill]) -> None:
        core = self._driver.core
        channel.send(hello(core.identity, self._settings, self._fabric))
        theirs = await hear(channel, core.identity, self._fabric, timeout_s=HELLO_TIMEOUT_S)
        self._join(channel, theirs)
        _log.info("peer_joined peer=%s", theirs.worker_id)
        try:
            await serve_peer(
                self._connections,
                channel,
                peer=theirs.incarnation,
                heartbeat_s=self._settings.heartbeat_s,
                lease_s=theirs.lease_s,
                on_message=lambda message: self._on_message(theirs.incarnation, message),
            )
        finally:
            self._connections.remove(theirs.incarnation)
            with self._driver.event() as now_ns:
                core.peer_lost(theirs.incarnation, now_ns=now_ns)

    def _join(self, channel: Channel[DecodeToPrefill], theirs: PeerHello) -> None:
        """Take the peer's regions; the heartbeat that follows is the acceptance."""
        if theirs.incarnation in self._connections:
            channel.send(PeerRefused(field="connection", ours="open", theirs="second"))
            raise RemoteProtocolError("it is connected already", peer=theirs.worker_id)
        try:
            with self._driver.event():
                self._sender.peer_joined(theirs)
        except (RemoteProtocolError, FabricError) as error:
            channel.send(PeerRefused(field="regions", ours=error.message, theirs="unusable"))
            raise
        self._connections.add(theirs.incarnation, channel)
        heartbeat = Heartbeat(sender=self._driver.core.identity.incarnation, receiver=theirs.incarnation)
        channel.send(heartbeat)

    def _on_message(self, peer: Incarnation, message: DecodeToPrefill) -> None:
        """Raises: `RemoteProtocolError` when a grant is malformed: the connection ends."""
        prefill = self._driver.core.prefill
        if prefill is None:
            return
        with self._driver.event() as now_ns:
            match message:
                case Grant():
                    self._driver.core.on_grant(peer, message, now_ns=now_ns)
                case Cancel():
                    prefill.on_cancel(peer, message, now_ns=now_ns)
                case Heartbeat() | PeerHello() | PeerRefused():
                    pass
