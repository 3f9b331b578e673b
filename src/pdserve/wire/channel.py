"""One authenticated connection that carries messages both ways between two processes: a WebSocket. See `docs/wire.md`.

This is a connection's life, and the dialling of one; where connections come in is `acceptor.py`.

A channel preserves order and loses nothing while it lives; what was under way when it ends is lost. Liveness is not its
business: both ends send heartbeats and judge silence themselves.
"""

import asyncio
import contextlib
import logging
import socket
import ssl
from collections import deque
from typing import Generic, TypeVar

import aiohttp
from aiohttp import web

from pdserve.errors import AuthenticationError, PeerLost, RemoteProtocolError
from pdserve.units import MIB
from pdserve.wire.authentication import SUBPROTOCOL, authenticate_dialled
from pdserve.wire.codec import MAX_MESSAGE_BYTES, Codec
from pdserve.wire.peer import Message
from pdserve.wire.tls_refusal import TLS_REQUIRED_STATUS, distrust_of, end_of, has_no_tls, needs_tls

MAX_QUEUED_MESSAGES = 4096
"""A decode worker sends one message a step: at 100 steps/s a peer must stop reading for 40 s to reach this."""

MAX_QUEUED_BYTES = 64 * MIB
"""Eight messages of the greatest size."""

CLOSE_TIMEOUT_S = 2.0
"""How long `close` waits for queued messages to leave and for the peer's close frame before it cuts the connection."""

SEND_TIMEOUT_S = 30.0
"""A peer that takes nothing for this long is lost."""

WEBSOCKET_LIMIT_BYTES = MAX_MESSAGE_BYTES + 1
"""aiohttp refuses messages of `max_msg_size` bytes and more, we refuse those of more than `MAX_MESSAGE_BYTES`."""

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

_log = logging.getLogger(__name__)


class Channel(Generic[T_co]):
    """One end of a connection; receives messages of the union `T_co`, sends any message.

    Threads: the event loop's only. Lifetime: whoever made it closes it; `receive` has one caller at a time.
    """

    def __init__(
        self, connection: aiohttp.ClientWebSocketResponse | web.WebSocketResponse, codec: Codec[T_co], *, peer: str
    ) -> None:
        self.peer = peer
        """Address or worker id, for errors and logs; the owner may set it to the id once a handshake gave one."""
        self._connection = connection
        self._codec = codec
        self._outgoing: deque[bytes] = deque()
        self._outgoing_bytes = 0
        self._wake = asyncio.Event()
        self._closing = False
        self._pump = asyncio.create_task(self._send_outgoing(), name=f"channel {peer}")

    @property
    def closed(self) -> bool:
        """True once no message can be sent any more."""
        return self._closing or self._connection.closed

    def send(self, message: Message) -> None:
        """Queue a message; never blocks.

        Raises: `PeerLost` when the channel is closed, or when the peer reads so slowly that the queue is full (the
        channel is cut then); `LocalProtocolError` when the message is over the bound.
        """
        if self.closed:
            raise PeerLost(f"the connection to {self.peer} is closed", peer=self.peer)
        encoded = self._codec.encode(message)
        if len(self._outgoing) >= MAX_QUEUED_MESSAGES or self._outgoing_bytes + len(encoded) > MAX_QUEUED_BYTES:
            num_messages, num_bytes = len(self._outgoing), self._outgoing_bytes
            self.abort()
            raise PeerLost(
                f"{self.peer} reads too slowly: {num_messages} messages ({num_bytes} bytes) were waiting",
                peer=self.peer,
            )
        self._outgoing.append(encoded)
        self._outgoing_bytes += len(encoded)
        self._wake.set()

    async def receive(self) -> T_co:
        """The next message.

        Raises: `PeerLost` when the connection ended, `RemoteProtocolError` when the peer sent what is no message of the
        union (the channel is cut then).
        """
        try:
            return await self._receive()
        except RemoteProtocolError:
            self.abort()
            raise

    async def close(self) -> None:
        """Send what is queued, then end the connection; at most `CLOSE_TIMEOUT_S`. Idempotent."""
        self._closing = True
        self._wake.set()
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await asyncio.wait({self._pump})
                await self._connection.close()
        except TimeoutError:
            self.abort()

    async def _receive(self) -> T_co:
        try:
            incoming = await self._connection.receive()
        except RuntimeError as error:
            raise PeerLost(f"the connection to {self.peer} is closed", peer=self.peer) from error
        match incoming.type:
            case aiohttp.WSMsgType.BINARY:
                return self._codec.decode(incoming.data, peer=self.peer)
            case aiohttp.WSMsgType.TEXT:
                raise RemoteProtocolError("a text frame, where messages are binary", peer=self.peer)
            case aiohttp.WSMsgType.ERROR if isinstance(incoming.data, aiohttp.WebSocketError):
                raise RemoteProtocolError(f"broken WebSocket frame: {incoming.data}", peer=self.peer)
            case _:
                self.abort()
                raise PeerLost(f"the connection to {self.peer} ended", peer=self.peer)

    async def _send_outgoing(self) -> None:
        try:
            while True:
                while self._outgoing:
                    encoded = self._outgoing.popleft()
                    async with asyncio.timeout(SEND_TIMEOUT_S):
                        await self._connection.send_bytes(encoded)
                    self._outgoing_bytes -= len(encoded)
                if self._closing:
                    return
                self._wake.clear()
                await self._wake.wait()
        except (OSError, RuntimeError, TimeoutError, aiohttp.ClientError) as error:
            _log.debug("channel_send_failed peer=%s error=%r", self.peer, error)
            self.abort()

    def abort(self) -> None:
        """End the connection at once; a waiting `receive` sees its end."""
        self._closing = True
        self._outgoing.clear()
        self._wake.set()
        endpoint = self._connection.get_extra_info("socket")
        if endpoint is not None:
            with contextlib.suppress(OSError):
                endpoint.shutdown(socket.SHUT_RDWR)


async def dial(
    session: aiohttp.ClientSession,
    url: str,
    codec: Codec[T],
    *,
    secret: str | None,
    timeout_s: float,
    tls: ssl.SSLContext | None = None,
) -> Channel[T]:
    """A channel to the worker or gateway at `url` (`http://` or `https://`), which knows `secret` where there is one,
    and has a certificate that `tls` believes where that is given.

    Raises: `PeerLost` when nobody answers there in time or the answer is no WebSocket, `AuthenticationError` when the
    secret or the certificate is refused, or when one end wants TLS and the other does not.
    """
    if tls is not None and not url.startswith("https://"):
        raise AuthenticationError(has_no_tls(url))
    try:
        async with asyncio.timeout(timeout_s):
            return Channel(await _connect(session, url, codec, secret=secret, tls=tls), codec, peer=url)
    except TimeoutError as error:
        raise PeerLost(f"{url} did not answer within {timeout_s:g} s", peer=url) from error
    except aiohttp.WSServerHandshakeError as error:
        if error.status == 401:
            raise AuthenticationError(f"{url} refuses our cluster secret; both ends need the same one") from error
        if error.status == TLS_REQUIRED_STATUS:
            raise AuthenticationError(needs_tls(url)) from error
        raise PeerLost(f"{url} answers with HTTP status {error.status} instead of a WebSocket", peer=url) from error
    except (aiohttp.ClientError, OSError) as error:
        distrust = distrust_of(url, error)
        if distrust is not None:
            raise AuthenticationError(distrust) from error
        raise PeerLost(end_of(url, error), peer=url) from error


async def _connect(
    session: aiohttp.ClientSession, url: str, codec: Codec[T], *, secret: str | None, tls: ssl.SSLContext | None
) -> aiohttp.ClientWebSocketResponse:
    connection = await session.ws_connect(
        url,
        protocols=() if secret is None else (SUBPROTOCOL,),
        max_msg_size=WEBSOCKET_LIMIT_BYTES,
        compress=0,
        timeout=aiohttp.ClientWSTimeout(ws_close=CLOSE_TIMEOUT_S),  # pyright: ignore[reportCallIssue]
        ssl=True if tls is None else tls,
    )
    if secret is not None:
        try:
            await authenticate_dialled(connection, secret, codec.conversation, url=url)
        except BaseException:
            await connection.close()
            raise
    return connection
