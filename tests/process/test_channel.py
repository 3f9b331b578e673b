"""Channels over real sockets on loopback."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web

from pdserve.errors import LocalProtocolError, PeerLost, RemoteProtocolError
from pdserve.ids import Incarnation, RequestId
from pdserve.sampling import SamplingParams
from pdserve.wire.acceptor import Acceptor
from pdserve.wire.channel import MAX_QUEUED_MESSAGES, Channel, dial
from pdserve.wire.cluster import (
    Abort,
    Failed,
    FailureKind,
    GatewayHeartbeat,
    GatewayToWorker,
    Generate,
    Load,
    WorkerHeartbeat,
    WorkerToGateway,
)
from pdserve.wire.codec import MAX_MESSAGE_BYTES, gateway_codec, worker_codec

ServerEnd = Channel[WorkerToGateway]
ClientEnd = Channel[GatewayToWorker]

HEARTBEAT = WorkerHeartbeat(sender=Incarnation(1), loads=(Load(),))


@asynccontextmanager
async def served(serve: Callable[[ServerEnd], Awaitable[None]]) -> AsyncGenerator[tuple[aiohttp.ClientSession, str]]:
    """A server whose only endpoint accepts a channel and gives it to `serve`; yields a session and the URL."""
    acceptor = Acceptor(gateway_codec(), secret=None, max_connections=8)

    async def handle(request: web.Request) -> web.StreamResponse:
        return await acceptor.accept(request, serve)

    app = web.Application()
    app.router.add_get("/channel", handle)
    runner = web.AppRunner(app, handle_signals=False, shutdown_timeout=1.0)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port: int = runner.addresses[0][1]
    try:
        async with aiohttp.ClientSession() as session:
            yield session, f"http://127.0.0.1:{port}/channel"
    finally:
        await runner.cleanup()


async def dialled(session: aiohttp.ClientSession, url: str) -> ClientEnd:
    return await dial(session, url, worker_codec(), secret=None, timeout_s=5.0)


async def within(awaitable: Awaitable[object], timeout_s: float = 5.0) -> object:
    return await asyncio.wait_for(awaitable, timeout_s)


async def read_until_lost(channel: ServerEnd) -> None:
    with pytest.raises(PeerLost):
        while True:
            await channel.receive()


async def test_channel_messages_arrive_in_order_both_ways() -> None:
    async def echo(channel: ServerEnd) -> None:
        for _ in range(200):
            message = await channel.receive()
            assert isinstance(message, WorkerHeartbeat)
            channel.send(GatewayHeartbeat(sender=Incarnation(message.loads[0].num_running)))

    async with served(echo) as (session, url):
        channel = await dialled(session, url)
        for index in range(200):
            channel.send(WorkerHeartbeat(sender=Incarnation(1), loads=(Load(num_running=index),)))
        for index in range(200):
            assert await within(channel.receive()) == GatewayHeartbeat(sender=Incarnation(index))
        with pytest.raises(PeerLost):
            await within(channel.receive())
        await channel.close()


async def test_channel_message_of_nearly_the_bound_arrives() -> None:
    received: asyncio.Future[WorkerToGateway] = asyncio.get_running_loop().create_future()

    async def take_one(channel: ServerEnd) -> None:
        received.set_result(await channel.receive())

    async with served(take_one) as (session, url):
        channel = await dialled(session, url)
        sent = failure("x" * (MAX_MESSAGE_BYTES - 200))
        channel.send(sent)
        assert await within(received) == sent
        await channel.close()


async def test_channel_message_over_the_bound_is_our_error() -> None:
    async with served(read_until_lost) as (session, url):
        channel = await dialled(session, url)
        with pytest.raises(LocalProtocolError):
            channel.send(failure("x" * MAX_MESSAGE_BYTES))
        await channel.close()


@pytest.mark.parametrize("frame", [b"\xc1", b"", b"\x81\xa4type\xa8Surprise", b"x" * (MAX_MESSAGE_BYTES + 1), "text"])
async def test_channel_malformed_frame_is_the_peers_error_and_closes(frame: bytes | str) -> None:
    failed: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()

    async def expect_error(channel: ServerEnd) -> None:
        try:
            await channel.receive()
        except RemoteProtocolError as error:
            assert channel.closed
            failed.set_result(error)

    async with served(expect_error) as (session, url):
        raw = await session.ws_connect(url)
        with contextlib.suppress(ConnectionError):  # The server may cut a message over the bound while it is sent.
            await (raw.send_str(frame) if isinstance(frame, str) else raw.send_bytes(frame))
        assert isinstance(await within(failed), RemoteProtocolError)
        await raw.close()


async def test_channel_message_of_the_other_direction_is_the_peers_error() -> None:
    failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def expect_error(channel: ServerEnd) -> None:
        with pytest.raises(RemoteProtocolError):
            await channel.receive()
        failed.set_result(None)

    async with served(expect_error) as (session, url):
        channel = await dialled(session, url)
        channel.send(Abort(request_id=RequestId("r"), receiver=Incarnation(1)))
        await within(failed)
        await channel.close()


async def test_channel_send_after_close_raises_peer_lost() -> None:
    async with served(read_until_lost) as (session, url):
        channel = await dialled(session, url)
        await channel.close()
        await channel.close()
        assert channel.closed
        with pytest.raises(PeerLost):
            channel.send(HEARTBEAT)


async def test_channel_close_delivers_what_was_queued() -> None:
    async def farewell(channel: ServerEnd) -> None:
        channel.send(GatewayHeartbeat(sender=Incarnation(7)))

    async with served(farewell) as (session, url):
        channel = await dialled(session, url)
        assert await within(channel.receive()) == GatewayHeartbeat(sender=Incarnation(7))
        await channel.close()


async def test_channel_close_wakes_a_waiting_receive() -> None:
    async with served(read_until_lost) as (session, url):
        channel = await dialled(session, url)
        waiting = asyncio.create_task(channel.receive())
        await asyncio.sleep(0)
        await channel.close()
        with pytest.raises(PeerLost):
            await within(waiting)


async def test_channel_peer_that_does_not_read_is_cut_at_the_bound() -> None:
    release = asyncio.Event()

    async def ignore(channel: ServerEnd) -> None:
        await release.wait()

    async with served(ignore) as (session, url):
        channel = await dialled(session, url)
        big = Generate(
            request_id=RequestId("r"),
            receiver=Incarnation(1),
            dp_rank=0,
            prompt_token_ids=tuple(range(70_000, 170_000)),
            sampling=SamplingParams(max_tokens=1),
            prefill=None,
            timeout_s=1.0,
        )
        with pytest.raises(PeerLost, match="too slowly"):
            for _ in range(MAX_QUEUED_MESSAGES + 1):
                channel.send(big)
        assert channel.closed
        with pytest.raises(PeerLost):
            await within(channel.receive())
        release.set()
        await within(channel.close())


async def test_channel_peer_that_vanishes_ends_receive() -> None:
    async def vanish(channel: ServerEnd) -> None:
        await channel.receive()

    async with served(vanish) as (session, url):
        channel = await dialled(session, url)
        channel.send(HEARTBEAT)
        with pytest.raises(PeerLost):
            await within(channel.receive())
        with pytest.raises(PeerLost):
            channel.send(HEARTBEAT)
        await channel.close()


async def test_channel_abort_ends_both_ends_at_once() -> None:
    lost = asyncio.Event()

    async def expect_loss(channel: ServerEnd) -> None:
        await read_until_lost(channel)
        lost.set()

    async with served(expect_loss) as (session, url):
        channel = await dialled(session, url)
        waiting = asyncio.create_task(channel.receive())
        await asyncio.sleep(0)
        channel.abort()
        with pytest.raises(PeerLost):
            await within(waiting)
        await within(lost.wait())
        with pytest.raises(PeerLost):
            channel.send(HEARTBEAT)
        await channel.close()


async def test_dial_nobody_listening_raises_peer_lost_with_the_url() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/channel"
        async with aiohttp.ClientSession() as session:
            with pytest.raises(PeerLost, match="can't reach http://127"):
                await dialled(session, url)


async def test_dial_peer_that_never_answers_raises_peer_lost_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        async with aiohttp.ClientSession() as session:
            with pytest.raises(PeerLost, match="did not answer"):
                url = f"http://127.0.0.1:{silent.getsockname()[1]}/channel"
                await dial(session, url, worker_codec(), secret=None, timeout_s=0.2)


async def test_dial_endpoint_that_is_no_websocket_raises_peer_lost_with_the_status() -> None:
    async with served(read_until_lost) as (session, url):
        with pytest.raises(PeerLost, match="404"):
            await dialled(session, url + "/nowhere")


async def test_channel_sockets_do_not_delay_small_messages() -> None:
    async with served(read_until_lost) as (session, url):
        connection = await session.ws_connect(url)
        endpoint: socket.socket = connection.get_extra_info("socket")
        assert endpoint.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert connection.compress == 0
        await connection.close()


def failure(message: str) -> Failed:
    return Failed(
        sender=Incarnation(1), request_id=RequestId("r"), kind=FailureKind.INTERNAL, message=message, retry_after_s=None
    )
