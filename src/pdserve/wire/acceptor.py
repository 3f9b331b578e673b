"""Where connections come in: bounded in number, and taken for messages only once the dialler is authenticated."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from enum import Enum
from typing import Generic, TypeVar

from aiohttp import web

from pdserve.errors import AuthenticationError, PeerLost
from pdserve.wire.authentication import REFUSED, SUBPROTOCOL, asks_for_proof, authenticate_dialler
from pdserve.wire.channel import CLOSE_TIMEOUT_S, WEBSOCKET_LIMIT_BYTES, Channel
from pdserve.wire.codec import Codec
from pdserve.wire.tls_refusal import TLS_REQUIRED

AUTHENTICATION_TIMEOUT_S = 5.0
"""Three messages; a core that is busy with a pass may take a second for each."""

MAX_UNPROVEN = 32
"""Connections of which nobody knows yet who dialled. Each may make us hold one message: 256 MiB in all."""

T = TypeVar("T")

_log = logging.getLogger(__name__)


class Credential(Enum):
    """What a dialler was refused for."""

    SECRET = "cluster_secret"
    CERTIFICATE = "certificate"


class Acceptor(Generic[T]):
    """The server's side of one endpoint. Threads: the event loop's only."""

    def __init__(
        self,
        codec: Codec[T],
        *,
        secret: str | None,
        max_connections: int,
        needs_tls: bool = False,
        on_refused: Callable[[Credential], None] = lambda _: None,
    ) -> None:
        """`secret` is the cluster's; None: anybody may connect. `max_connections` includes those not yet proven.

        With `needs_tls` only who came with a certificate is served. `on_refused` counts who is not authenticated.
        """
        self._codec = codec
        self._secret = secret
        self._needs_tls = needs_tls
        self._on_refused = on_refused
        self._max_connections = max_connections
        self._num_open = 0
        self._num_unproven = 0

    async def accept(self, request: web.Request, serve: Callable[[Channel[T]], Awaitable[None]]) -> web.StreamResponse:
        """Give `serve` a channel to who dialled, and close it after; what it raises comes out.

        Raises: `web.HTTPException`: 401 when one end has a secret and the other none, 426 when it is not in TLS and
        should be, 503 when there are too many, 400 when the request asks for no WebSocket.
        """
        if self._needs_tls and not _has_certificate(request):
            self._refuse(request, Credential.CERTIFICATE, "it did not come in TLS")
            raise web.HTTPUpgradeRequired(text=TLS_REQUIRED)
        if asks_for_proof(request) != (self._secret is not None):
            self._refuse(request, Credential.SECRET, "one end has a cluster secret, the other none")
            raise web.HTTPUnauthorized(text=_one_sided(self._secret))
        if self._num_open >= self._max_connections or self._num_unproven >= MAX_UNPROVEN:
            raise web.HTTPServiceUnavailable(text=f"{self._num_open} are connected already; come back later")
        self._num_open += 1
        try:
            connection = await self._open(request)
            if connection.closed:
                return connection
            channel = Channel(connection, self._codec, peer=_peer_of(request))
            try:
                await serve(channel)
            finally:
                await channel.close()
            return connection
        finally:
            self._num_open -= 1

    async def _open(self, request: web.Request) -> web.WebSocketResponse:
        """The upgraded connection: authenticated where there is a secret, closed where that failed."""
        protocols = () if self._secret is None else (SUBPROTOCOL,)
        connection = web.WebSocketResponse(
            max_msg_size=WEBSOCKET_LIMIT_BYTES, compress=False, timeout=CLOSE_TIMEOUT_S, protocols=protocols
        )
        self._num_unproven += 1
        try:
            await connection.prepare(request)
            if self._secret is not None:
                await self._authenticate(connection, self._secret, request)
        finally:
            self._num_unproven -= 1
        return connection

    async def _authenticate(self, connection: web.WebSocketResponse, secret: str, request: web.Request) -> None:
        try:
            async with asyncio.timeout(AUTHENTICATION_TIMEOUT_S):
                await authenticate_dialler(connection, secret, self._codec.conversation)
        except (AuthenticationError, PeerLost, TimeoutError, OSError) as error:
            self._refuse(request, Credential.SECRET, repr(error))
            await connection.close(code=REFUSED)

    def _refuse(self, request: web.Request, credential: Credential, reason: str) -> None:
        _log.warning("peer_not_authenticated peer=%s reason=%s", _peer_of(request), reason)
        self._on_refused(credential)


def _has_certificate(request: web.Request) -> bool:
    """Whether it came in TLS with a certificate, which the listener believed then."""
    return request.transport is not None and bool(request.transport.get_extra_info("peercert"))


def _peer_of(request: web.Request) -> str:
    return request.remote or "unknown address"


def _one_sided(secret: str | None) -> str:
    if secret is None:
        return "no cluster secret is set here, and yours is; set PDSERVE_CLUSTER_SECRET alike everywhere"
    return "the cluster secret is missing; set PDSERVE_CLUSTER_SECRET"
