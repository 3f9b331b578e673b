"""Where connections come in: bounded in number, and taken for messages only once the dialler is authenticated."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from aiohttp import web

from pdserve.errors import AuthenticationError, PeerLost
from pdserve.wire.authentication import REFUSED, SUBPROTOCOL, asks_for_proof, authenticate_dialler
from pdserve.wire.channel import CLOSE_TIMEOUT_S, WEBSOCKET_LIMIT_BYTES, Channel
from pdserve.wire.codec import Codec

AUTHENTICATION_TIMEOUT_S = 5.0
"""Three messages; a core that is busy with a pass may take a second for each."""

MAX_UNPROVEN = 32
"""Connections of which nobody knows yet who dialled. Each may make us hold one message: 256 MiB in all."""

T = TypeVar("T")

_log = logging.getLogger(__name__)


class Acceptor(Generic[T]):
    """The server's side of one endpoint. Threads: the event loop's only."""

    def __init__(self, codec: Codec[T], *, secret: str | None, max_connections: int) -> None:
        """`secret` is the cluster's; None: anybody may connect. `max_connections` includes those not yet proven."""
        self._codec = codec
        self._secret = secret
        self._max_connections = max_connections
        self._num_open = 0
        self._num_unproven = 0

    async def accept(self, request: web.Request, serve: Callable[[Channel[T]], Awaitable[None]]) -> web.StreamResponse:
        """Give `serve` a channel to who dialled, and close it after; what it raises comes out.

        Raises: `web.HTTPException`: 401 when one end has a secret and the other none, 503 when there are too many, 400
        when the request asks for no WebSocket.
        """
        if asks_for_proof(request) != (self._secret is not None):
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
                await self._authenticate(connection, self._secret, peer=_peer_of(request))
        finally:
            self._num_unproven -= 1
        return connection

    async def _authenticate(self, connection: web.WebSocketResponse, secret: str, *, peer: str) -> None:
        try:
            async with asyncio.timeout(AUTHENTICATION_TIMEOUT_S):
                await authenticate_dialler(connection, secret, self._codec.conversation)
        except (AuthenticationError, PeerLost, TimeoutError, OSError) as error:
            _log.warning("peer_not_authenticated peer=%s reason=%r", peer, error)
            await connection.close(code=REFUSED)


def _peer_of(request: web.Request) -> str:
    return request.remote or "unknown address"


def _one_sided(secret: str | None) -> str:
    if secret is None:
        return "no cluster secret is set here, and yours is; set PDSERVE_CLUSTER_SECRET alike everywhere"
    return "the cluster secret is missing; set PDSERVE_CLUSTER_SECRET"
