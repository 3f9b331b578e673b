"""Who may open a channel: both ends prove that they know the cluster secret, and nothing recorded proves anything."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from pdserve.errors import AuthenticationError, PeerLost
from pdserve.ids import Incarnation
from pdserve.wire import acceptor as acceptor_module
from pdserve.wire.acceptor import Acceptor
from pdserve.wire.authentication import NONCE_BYTES, PROOF_BYTES, REFUSED, SUBPROTOCOL, End, proof
from pdserve.wire.channel import Channel, dial
from pdserve.wire.cluster import GatewayHeartbeat, Leave, WorkerToGateway
from pdserve.wire.codec import Codec, Conversation, decode_side_codec, gateway_codec, worker_codec

SECRET = "a secret that nobody may see"
LEAVE = Leave(sender=Incarnation(1))
DEADLINE_S = 5.0

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(slots=True)
class Server:
    url: str
    session: aiohttp.ClientSession
    served: list[WorkerToGateway] = field(default_factory=list[WorkerToGateway])
    """What came over channels."""

    async def dial(self, secret: str | None, codec: Codec[Any] | None = None) -> Channel[Any]:
        return await dial(self.session, self.url, codec or worker_codec(), secret=secret, timeout_s=DEADLINE_S)

    async def upgrade(self) -> aiohttp.ClientWebSocketResponse:
        """As a dialler that has a secret."""
        return await self.session.ws_connect(self.url, protocols=(SUBPROTOCOL,))


@asynccontextmanager
async def listening(handle: Handler) -> AsyncGenerator[tuple[aiohttp.ClientSession, str]]:
    app = web.Application()
    app.router.add_get("/channel", handle)
    runner = web.AppRunner(app, handle_signals=False, shutdown_timeout=1.0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    port: int = runner.addresses[0][1]
    try:
        async with aiohttp.ClientSession() as session:
            yield session, f"http://127.0.0.1:{port}/channel"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def serving(secret: str | None = SECRET, *, max_connections: int = 8) -> AsyncGenerator[Server]:
    """A server that answers every message with a heartbeat."""
    acceptor = Acceptor(gateway_codec(), secret=secret, max_connections=max_connections)

    async def answer(channel: Channel[WorkerToGateway]) -> None:
        with contextlib.suppress(PeerLost):
            while True:
                server.served.append(await channel.receive())
                channel.send(GatewayHeartbeat(sender=Incarnation(7)))

    async def handle(request: web.Request) -> web.StreamResponse:
        return await acceptor.accept(request, answer)

    async with listening(handle) as (session, url):
        server = Server(url, session)
        yield server


async def within(awaitable: Awaitable[Any]) -> Any:
    return await asyncio.wait_for(awaitable, DEADLINE_S)


async def is_served(channel: Channel[Any]) -> bool:
    channel.send(LEAVE)
    answer = await within(channel.receive())
    await channel.close()
    return isinstance(answer, GatewayHeartbeat)


async def close_code(connection: aiohttp.ClientWebSocketResponse) -> int | None:
    """With which the other end closes; whatever came before is skipped."""
    while not connection.closed:
        await within(connection.receive())
    return connection.close_code


async def test_ends_with_the_same_secret_exchange_messages() -> None:
    async with serving() as server:
        assert await is_served(await server.dial(SECRET))


@pytest.mark.parametrize("theirs", [None, "", "wrong", "geheimn\u00e9", SECRET + " "])
async def test_dialler_with_another_secret_or_none_is_refused(theirs: str | None) -> None:
    async with serving() as server:
        with pytest.raises(AuthenticationError, match="both ends need the same one"):
            await server.dial(theirs)
        assert await is_served(await server.dial(SECRET))


async def test_dialler_with_a_secret_refuses_a_server_without_one() -> None:
    async with serving(secret=None) as server:
        with pytest.raises(AuthenticationError):
            await server.dial(SECRET)
        assert await is_served(await server.dial(None))


async def test_proof_for_one_conversation_is_refused_in_another() -> None:
    async with serving() as server:
        with pytest.raises(AuthenticationError):
            await server.dial(SECRET, decode_side_codec())


async def test_server_that_drops_the_question_is_refused_by_the_dialler() -> None:
    """As one on the path would, who takes the offer out of the upgrade."""

    async def handle(request: web.Request) -> web.StreamResponse:
        connection = web.WebSocketResponse()
        await connection.prepare(request)
        async for _ in connection:
            raise AssertionError("the dialler sent something")
        return connection

    async with listening(handle) as (session, url):
        with pytest.raises(AuthenticationError, match="does not ask"):
            await dial(session, url, worker_codec(), secret=SECRET, timeout_s=DEADLINE_S)


@pytest.mark.parametrize("answer", ["nothing known", "the dialler's own proof", "none"])
async def test_server_that_does_not_know_the_secret_gets_one_proof_and_no_message(answer: str) -> None:
    received: list[bytes] = []

    async def handle(request: web.Request) -> web.StreamResponse:
        connection = web.WebSocketResponse(protocols=(SUBPROTOCOL,))
        await connection.prepare(request)
        await connection.send_bytes(bytes(NONCE_BYTES))
        received.append(await connection.receive_bytes())
        match answer:
            case "nothing known":
                await connection.send_bytes(bytes(PROOF_BYTES))
            case "the dialler's own proof":
                await connection.send_bytes(received[0][NONCE_BYTES:])
            case _:
                await connection.send_bytes(b"")
        received.extend([incoming.data async for incoming in connection])
        return connection

    async with listening(handle) as (session, url):
        with pytest.raises(AuthenticationError):
            await dial(session, url, worker_codec(), secret=SECRET, timeout_s=DEADLINE_S)
    assert [len(frame) for frame in received] == [NONCE_BYTES + PROOF_BYTES]


async def test_server_that_never_challenges_is_given_up_in_time() -> None:
    async def handle(request: web.Request) -> web.StreamResponse:
        connection = web.WebSocketResponse(protocols=(SUBPROTOCOL,))
        await connection.prepare(request)
        await connection.receive()
        return connection

    async with listening(handle) as (session, url):
        with pytest.raises(PeerLost, match="did not answer"):
            await dial(session, url, worker_codec(), secret=SECRET, timeout_s=0.2)


@pytest.mark.parametrize(
    "frame",
    [b"", bytes(NONCE_BYTES + PROOF_BYTES), bytes(PROOF_BYTES), bytes(1 << 20), gateway_codec().encode(LEAVE), "text"],
)
async def test_dialler_that_sends_no_proof_is_closed_and_its_messages_are_not_read(frame: bytes | str) -> None:
    async with serving() as server:
        connection = await server.upgrade()
        await (connection.send_str(frame) if isinstance(frame, str) else connection.send_bytes(frame))
        with contextlib.suppress(ConnectionError):
            await connection.send_bytes(gateway_codec().encode(LEAVE))
        assert await close_code(connection) == REFUSED
        assert server.served == []


async def test_recorded_dialler_is_refused_when_replayed() -> None:
    async with serving() as server, recorded(server.url) as (url, record):
        channel = await dial(server.session, url, worker_codec(), secret=SECRET, timeout_s=DEADLINE_S)
        assert await is_served(channel)
        assert (len(server.served), SECRET.encode() in record.sent + record.answered) == (1, False)
        reader, writer = await asyncio.open_connection(*address_of(server.url))
        writer.write(record.sent)
        answer = await within(reader.read())
        assert b"101 Switching Protocols" in answer
        assert REFUSED.to_bytes(2, "big") in answer
        assert server.served == [LEAVE]
        writer.close()


async def test_recorded_proof_is_refused_on_another_connection() -> None:
    """Unlike the bytes of a whole connection it answers the new challenge, with the nonces of the old one."""
    async with serving() as server:
        first = await server.upgrade()
        dialled_nonce = await first.receive_bytes()
        nonce = bytes(NONCE_BYTES)
        good = proof(SECRET, End.DIALLER, Conversation.CLUSTER, dialled_nonce=dialled_nonce, dialler_nonce=nonce)
        second = await server.upgrade()
        await second.send_bytes(nonce + good)
        assert await close_code(second) == REFUSED
        await first.send_bytes(nonce + good)
        theirs = proof(SECRET, End.DIALLED, Conversation.CLUSTER, dialled_nonce=dialled_nonce, dialler_nonce=nonce)
        assert await within(first.receive_bytes()) == theirs
        await first.close()


async def test_dialler_that_stays_silent_is_closed_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptor_module, "AUTHENTICATION_TIMEOUT_S", 0.1)
    async with serving() as server:
        assert await close_code(await server.upgrade()) == REFUSED


async def test_connections_not_yet_proven_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptor_module, "MAX_UNPROVEN", 2)
    async with serving() as server:
        half_open = [await server.upgrade() for _ in range(2)]
        with pytest.raises(PeerLost, match="503"):
            await server.dial(SECRET)
        for connection in half_open:
            await connection.close()
        channels = [await server.dial(SECRET) for _ in range(3)]
        for channel in channels:
            assert await is_served(channel)


async def test_connections_are_bounded_and_room_comes_back() -> None:
    async with serving(max_connections=1) as server:
        channel = await server.dial(SECRET)
        with pytest.raises(PeerLost, match="503"):
            await server.dial(SECRET)
        assert await is_served(channel)
        async with asyncio.timeout(DEADLINE_S):
            while True:
                with contextlib.suppress(PeerLost):
                    channel = await server.dial(SECRET)
                    break
        assert await is_served(channel)


def test_proof_depends_on_everything_it_is_told() -> None:
    def made(
        secret: str = SECRET,
        end: End = End.DIALLER,
        conversation: Conversation = Conversation.PEER,
        dialled_nonce: bytes = bytes(NONCE_BYTES),
        dialler_nonce: bytes = bytes([1]) * NONCE_BYTES,
    ) -> bytes:
        return proof(secret, end, conversation, dialled_nonce=dialled_nonce, dialler_nonce=dialler_nonce)

    proofs = {
        made(),
        made(secret=SECRET + "x"),
        made(end=End.DIALLED),
        made(conversation=Conversation.CLUSTER),
        made(dialled_nonce=bytes([2]) * NONCE_BYTES),
        made(dialler_nonce=bytes([2]) * NONCE_BYTES),
        made(dialled_nonce=bytes([1]) * NONCE_BYTES, dialler_nonce=bytes(NONCE_BYTES)),
    }
    assert len(proofs) == 7
    assert {len(each) for each in proofs} == {PROOF_BYTES}


@dataclass(slots=True)
class Record:
    """The bytes of one connection."""

    sent: bytes = b""
    answered: bytes = b""


@asynccontextmanager
async def recorded(url: str) -> AsyncGenerator[tuple[str, Record]]:
    """A way to `url` that keeps what goes over it; yields the URL to dial instead."""
    record = Record()

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server_reader, server_writer = await asyncio.open_connection(*address_of(url))

        async def upstream() -> None:
            while data := await reader.read(65536):
                record.sent += data
                server_writer.write(data)
            server_writer.write_eof()

        async def downstream() -> None:
            while data := await server_reader.read(65536):
                record.answered += data
                writer.write(data)
            writer.close()

        await asyncio.gather(upstream(), downstream())
        server_writer.close()

    proxy = await asyncio.start_server(forward, "127.0.0.1", 0)
    host, port = proxy.sockets[0].getsockname()
    async with proxy:
        yield f"http://{host}:{port}/channel", record


def address_of(url: str) -> tuple[str, int]:
    host, port = url.removeprefix("http://").removesuffix("/channel").split(":")
    return host, int(port)
