"""Where HTTP connections come in: bounded in number, and ended when no request comes on them in time.

Why not a site of aiohttp: it takes connections as long as there are descriptors. `connection_places.py` says who goes.
"""

import asyncio
import logging
import socket
import ssl
from collections.abc import AsyncGenerator
from contextlib import ExitStack, asynccontextmanager

from aiohttp import web
from aiohttp.typedefs import Handler

from pdserve.errors import InternalError
from pdserve.wire.connection_places import ConnectionPlaces, Place
from pdserve.wire.tls_listener import ACCEPT_RETRY_S

HEAD_TIMEOUT_S = 10.0
"""From the connection to the whole head of its first request; a TLS handshake is within."""

KEEPALIVE_TIMEOUT_S = 75.0
"""From an answer to the whole head of the next request. Load balancers keep connections for 60 s: they close first."""

BACKLOG = 128
"""Connections that the kernel holds for us; so many are accepted at a time, before anything else is done."""

_log = logging.getLogger(__name__)


@asynccontextmanager
async def listening(
    runner: web.AppRunner,
    host: str,
    port: int,
    places: ConnectionPlaces,
    *,
    tls: ssl.SSLContext | None = None,
    head_timeout_s: float = HEAD_TIMEOUT_S,
) -> AsyncGenerator[int]:
    """Serve `runner`'s application; yields the port, of the first address where `host` has several.

    Requires: `runner` is set up, and `count_requests` surrounds the application's handlers.
    Raises: `OSError`, `OverflowError` when the address can't be listened on.
    """
    if runner.server is None:
        raise InternalError("the runner is not set up")
    entrance = _Entrance(runner.server, places, tls, head_timeout_s)
    with ExitStack() as stack:
        listeners = [stack.enter_context(listener) for listener in await _bind(host, port)]
        try:
            for listener in listeners:
                entrance.open(listener)
            yield listeners[0].getsockname()[1]
        finally:
            await entrance.close(listeners)


@web.middleware
async def count_requests(request: web.Request, handler: Handler) -> web.StreamResponse:
    """The connection of a request that is worked on keeps its place."""
    connection = None if request.transport is None else request.transport.get_protocol()
    if not isinstance(connection, _Connection):
        return await handler(request)
    with connection.place.request():
        return await handler(request)


async def _bind(host: str, port: int) -> list[socket.socket]:
    """A socket for each address of `host`."""
    if not 0 <= port < 2**16:
        raise OverflowError("a port is 0 to 65535")  # getaddrinfo takes it modulo 65,536
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    listeners: list[socket.socket] = []
    try:
        for family, _, _, _, address in dict.fromkeys(found):
            listener = socket.create_server(address, family=family, backlog=BACKLOG)
            listener.setblocking(False)
            listeners.append(listener)
    except BaseException:
        for listener in listeners:
            listener.close()
        raise
    return listeners


class _Entrance:
    """Threads: the event loop's only."""

    def __init__(
        self, server: web.Server, places: ConnectionPlaces, tls: ssl.SSLContext | None, head_timeout_s: float
    ) -> None:
        self._server = server
        self._places = places
        self._tls = tls
        self._head_timeout_s = head_timeout_s
        self._loop = asyncio.get_running_loop()
        self._admissions: set[asyncio.Task[None]] = set()
        self._is_closed = False

    def open(self, listener: socket.socket) -> None:
        if not self._is_closed:
            self._loop.add_reader(listener, self._accept, listener)

    async def close(self, listeners: list[socket.socket]) -> None:
        """Nobody comes in any more; who is in stays."""
        self._is_closed = True
        for listener in listeners:
            self._loop.remove_reader(listener)
        for admission in self._admissions:
            admission.cancel()
        await asyncio.gather(*self._admissions, return_exceptions=True)

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(BACKLOG):
            try:
                client, _ = listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                _log.warning("accept_failed reason=%r", error)
                self._loop.remove_reader(listener)
                self._loop.call_later(ACCEPT_RETRY_S, self.open, listener)
                return
            client.setblocking(False)
            self._seat(client)

    def _seat(self, client: socket.socket) -> None:
        connection = _Connection(self._server)
        place = self._places.take(connection.abort)
        if place is None:
            client.close()
            return
        connection.place = place
        connection.head_timer = self._loop.call_later(self._head_timeout_s, place.head_is_due)
        connection.admission = self._loop.create_task(self._admit(client, connection))
        self._admissions.add(connection.admission)
        connection.admission.add_done_callback(self._admissions.discard)

    async def _admit(self, client: socket.socket, connection: "_Connection") -> None:
        """Hand the connection to the HTTP server, or end it."""
        handshake_timeout_s = self._head_timeout_s if self._tls else None
        try:
            await self._loop.connect_accepted_socket(
                lambda: connection, client, ssl=self._tls, ssl_handshake_timeout=handshake_timeout_s
            )
        except BaseException as error:
            client.close()
            connection.is_over()
            if not isinstance(error, OSError):
                raise
            _log.debug("connection_failed reason=%r", error)


class _Connection(asyncio.Protocol):
    """The HTTP server's protocol, and the place that its connection has."""

    place: Place
    head_timer: asyncio.TimerHandle
    admission: asyncio.Task[None]

    def __init__(self, server: web.Server) -> None:
        self._http = server()
        self._transport: asyncio.Transport | None = None

    def abort(self) -> None:
        if self._transport is None:
            self.admission.cancel()
        else:
            self._transport.abort()

    def is_over(self) -> None:
        self.head_timer.cancel()
        self.place.leave()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if isinstance(transport, asyncio.Transport):
            self._transport = transport
        self._http.connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_over()
        self._http.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._http.data_received(data)

    def eof_received(self) -> bool | None:
        return self._http.eof_received()

    def pause_writing(self) -> None:
        self._http.pause_writing()

    def resume_writing(self) -> None:
        self._http.resume_writing()
