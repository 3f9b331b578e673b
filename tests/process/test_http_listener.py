"""A gateway's port under a flood: connections that ask for nothing are bounded, and give way to those that do."""

import asyncio
import socket
import ssl
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from aiohttp import web
from tests.process.gateway_under_test import until
from tests.pure.certificates import Authority

from pdserve.config.tls import load_api_tls
from pdserve.wire import http_listener
from pdserve.wire.connection_places import ConnectionPlaces, Ending
from pdserve.wire.http_listener import count_requests, listening

DEADLINE_S = 5.0
HALF_A_HEAD = b"GET /live HTTP/1.1\r\nHost: x\r\n"

Client = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass(slots=True)
class Server:
    port: int
    places: ConnectionPlaces
    tls: ssl.SSLContext | None
    clients: AsyncExitStack
    endings: list[Ending]
    held: int = 0
    release: asyncio.Event = field(default_factory=asyncio.Event)

    async def connect(self, sent: bytes = b"", *, tls: bool = True) -> Client:
        """As a client that sends that much, and keeps the connection."""
        context = self.tls if tls else None
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", self.port, ssl=context, ssl_handshake_timeout=DEADLINE_S if context else None
        )
        self.clients.callback(writer.close)
        writer.write(sent)
        return reader, writer

    async def hold(self) -> Client:
        """A client whose request is being worked on."""
        num_held = self.held
        client = await self.connect(b"GET /hold HTTP/1.1\r\nHost: x\r\n\r\n")
        await until(self.num_held, lambda held: held == num_held + 1)
        return client

    async def num_held(self) -> int:
        return self.held

    async def num_taken(self) -> int:
        return self.places.num_taken


@asynccontextmanager
async def serving(
    *, max_connections: int, head_timeout_s: float = 60.0, tls: tuple[ssl.SSLContext, ssl.SSLContext] | None = None
) -> AsyncGenerator[Server]:
    """`tls` is the server's context and the client's."""

    async def live(request: web.Request) -> web.Response:
        return web.Response(text="live")

    async def hold(request: web.Request) -> web.Response:
        server.held += 1
        await server.release.wait()
        return web.Response(text="held")

    app = web.Application(middlewares=[count_requests])
    app.add_routes([web.get("/live", live), web.get("/hold", hold)])
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1.0, access_log=None)
    await runner.setup()
    endings: list[Ending] = []
    places = ConnectionPlaces(max_connections=max_connections, on_ended=endings.append)
    server_tls, client_tls = tls or (None, None)
    try:
        async with (
            listening(runner, "127.0.0.1", 0, places, tls=server_tls, head_timeout_s=head_timeout_s) as port,
            AsyncExitStack() as clients,
        ):
            server = Server(port, places, client_tls, clients, endings)
            yield server
    finally:
        await runner.cleanup()


async def end_of(client: Client) -> bytes:
    """What comes until the connection ends."""
    try:
        return await asyncio.wait_for(client[0].read(), DEADLINE_S)
    except ConnectionResetError:
        return b""


async def ends_of(clients: Sequence[Client]) -> list[bytes]:
    return await asyncio.gather(*map(end_of, clients))


async def answer_of(client: Client) -> bytes:
    head = await asyncio.wait_for(client[0].readuntil(b"\r\n\r\n"), DEADLINE_S)
    assert head.startswith(b"HTTP/1.1 200 ")
    return await asyncio.wait_for(client[0].readexactly(4), DEADLINE_S)


async def test_connection_without_a_whole_head_ends_in_time() -> None:
    async with serving(max_connections=8, head_timeout_s=0.1) as server:
        assert await ends_of([await server.connect(), await server.connect(HALF_A_HEAD)]) == [b"", b""]
        assert server.endings == [Ending.NO_REQUEST] * 2


async def test_flood_of_half_heads_is_bounded_and_whoever_asks_is_answered() -> None:
    async with serving(max_connections=4) as server:
        working = await server.hold()
        flood = [await server.connect(HALF_A_HEAD) for _ in range(12)]
        await until(server.num_taken, lambda taken: taken == 4)
        assert await answer_of(await server.connect(HALF_A_HEAD + b"\r\n")) == b"live"
        assert await ends_of(flood[:10]) == [b""] * 10
        assert server.endings == [Ending.DISPLACED] * 10
        server.release.set()
        assert await answer_of(working) == b"held"


async def test_connection_is_closed_at_once_when_all_others_have_requests() -> None:
    async with serving(max_connections=2) as server:
        working = [await server.hold() for _ in range(2)]
        assert await end_of(await server.connect(HALF_A_HEAD + b"\r\n")) == b""
        assert server.endings == [Ending.FULL]
        server.release.set()
        assert [await answer_of(client) for client in working] == [b"held"] * 2
        assert await answer_of(await server.connect(HALF_A_HEAD + b"\r\n")) == b"live"


async def test_place_of_a_client_that_leaves_is_free() -> None:
    async with serving(max_connections=4) as server:
        for client in [await server.connect(), await server.hold()]:
            client[1].transport.abort()
        await until(server.num_taken, lambda taken: taken == 0)
        assert server.endings == []


async def test_tls_handshakes_that_nobody_finishes_are_bounded_too(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    files = authority.files()
    client_tls = ssl.create_default_context(cafile=files.ca)
    client_tls.check_hostname = False
    async with serving(max_connections=2, tls=(load_api_tls(cert=files.cert, key=files.key), client_tls)) as server:
        silent = [await server.connect(tls=False) for _ in range(3)]
        assert await answer_of(await server.connect(HALF_A_HEAD + b"\r\n")) == b"live"
        assert await ends_of(silent[:2]) == [b""] * 2
        not_tls = await server.connect(HALF_A_HEAD, tls=False)
        assert await end_of(not_tls) == b""
        assert server.endings[:2] == [Ending.DISPLACED] * 2


async def test_listener_that_ran_out_of_descriptors_accepts_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_listener, "ACCEPT_RETRY_S", 0.05)
    async with serving(max_connections=4) as server:
        real_accept = socket.socket.accept
        failures = iter([OSError(24, "Too many open files")])

        def accept(listener: socket.socket) -> tuple[socket.socket, object]:
            for failure in failures:
                raise failure
            return real_accept(listener)

        monkeypatch.setattr(socket.socket, "accept", accept)
        assert await answer_of(await server.connect(HALF_A_HEAD + b"\r\n")) == b"live"
