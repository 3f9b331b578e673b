"""Where control connections come in under TLS: a port of their own, on which nobody is heard without a certificate.

Why not a TLS socket of the HTTP server: who is turned away there is not told why, nor is our log, and handshakes that
nobody finishes are not bounded.
"""

import asyncio
import logging
import socket
import ssl
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress

from aiohttp import web

from pdserve.errors import InternalError
from pdserve.wire.tls_refusal import NOT_IN_TLS

HANDSHAKE_TIMEOUT_S = 5.0
"""From the connection to a finished handshake; as long as the proof of a secret may take after it."""

MAX_HANDSHAKES = 32
"""Of which nobody knows yet who dialled; asyncio holds some 300 kB for each."""

ACCEPT_RETRY_S = 0.1
"""After the system had no descriptor for a connection."""

FIRST_BYTE = b"\x16"
"""Of every TLS handshake: the content type of its record."""

_log = logging.getLogger(__name__)


@asynccontextmanager
async def listening_in_tls(
    runner: web.AppRunner, host: str, port: int, context: ssl.SSLContext, *, on_refused: Callable[[], None]
) -> AsyncGenerator[int]:
    """Serve `runner`'s application to who has a certificate; yields the port. `on_refused` counts who has none.

    Requires: `runner` is set up. Raises: `OSError` when the address can't be listened on.
    """
    if runner.server is None:
        raise InternalError("the runner is not set up")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, port), family=family, backlog=128) as listener:
        listener.setblocking(False)
        gate = _Gate(runner.server, context, on_refused)
        accepting = asyncio.create_task(gate.run(listener), name="tls listener")
        try:
            yield listener.getsockname()[1]
        finally:
            accepting.cancel()
            with suppress(asyncio.CancelledError):
                await accepting


class _Gate:
    """Threads: the event loop's only."""

    def __init__(self, server: web.Server, context: ssl.SSLContext, on_refused: Callable[[], None]) -> None:
        self._server = server
        self._context = context
        self._on_refused = on_refused
        self._handshakes: set[asyncio.Task[None]] = set()

    async def run(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        try:
            while True:
                try:
                    connection, _ = await loop.sock_accept(listener)
                except OSError as error:
                    _log.warning("accept_failed reason=%r", error)
                    await asyncio.sleep(ACCEPT_RETRY_S)
                    continue
                if len(self._handshakes) >= MAX_HANDSHAKES:
                    connection.close()
                    continue
                handshake = asyncio.create_task(self._admit(connection))
                self._handshakes.add(handshake)
                handshake.add_done_callback(self._handshakes.discard)
        finally:
            for handshake in self._handshakes:
                handshake.cancel()
            await asyncio.gather(*self._handshakes, return_exceptions=True)

    async def _admit(self, connection: socket.socket) -> None:
        """Hand the connection to the HTTP server, or end it."""
        peer = "unknown address"
        try:
            peer = str(connection.getpeername()[0])
            connection.setblocking(False)
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                await _require_tls(connection)
                await asyncio.get_running_loop().connect_accepted_socket(
                    self._server, connection, ssl=self._context, ssl_handshake_timeout=HANDSHAKE_TIMEOUT_S
                )
        except (OSError, TimeoutError) as error:
            connection.close()
            self._on_refused()
            _log.warning("peer_without_certificate peer=%s reason=%r", peer, _reason(error))
        except BaseException:
            connection.close()
            raise


async def _require_tls(connection: socket.socket) -> None:
    """Raises: `ConnectionError` when something else comes; who speaks HTTP is told what is wanted."""
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(connection, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(connection)
    first = connection.recv(1, socket.MSG_PEEK)
    if first == FIRST_BYTE:
        return
    # Read first: the kernel resets a connection that is closed over unread bytes, and the answer is lost.
    await loop.sock_recv(connection, 65536)
    await loop.sock_sendall(connection, NOT_IN_TLS)
    raise ConnectionError("it does not speak TLS; start it with --tls-cert, --tls-key and --tls-ca, and dial https://")


def _reason(error: OSError) -> str:
    match error:
        case ssl.SSLCertVerificationError():
            return f"its certificate is refused: {error.verify_message}; it needs one of our --tls-ca"
        case ssl.SSLError(reason="PEER_DID_NOT_RETURN_A_CERTIFICATE"):
            return "it has no certificate; start it with --tls-cert, --tls-key and --tls-ca"
        case ssl.SSLError():
            return f"the TLS handshake failed: {error.reason}"
        case TimeoutError():
            return f"no TLS handshake within {HANDSHAKE_TIMEOUT_S:g} s"
        case _:
            return str(error)
