"""Control connections under TLS: both ends show a certificate of the cluster's CA, and nobody else is heard."""

import asyncio
import contextlib
import logging
import ssl
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import aiohttp
import pytest
from aiohttp import web
from tests.process.gateway_under_test import until
from tests.pure.certificates import Authority

from pdserve.config.tls import Tls, load_tls
from pdserve.errors import AuthenticationError, PeerLost
from pdserve.ids import Incarnation
from pdserve.wire import tls_listener
from pdserve.wire.acceptor import Acceptor, Credential
from pdserve.wire.channel import Channel, dial
from pdserve.wire.cluster import GatewayHeartbeat, GatewayToWorker, Leave, WorkerToGateway
from pdserve.wire.codec import gateway_codec, worker_codec
from pdserve.wire.tls_listener import listening_in_tls

SECRET = "a secret"
DEADLINE_S = 5.0
LEAVE = Leave(sender=Incarnation(1))


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    return load_tls(Authority(tmp_path_factory.mktemp("cluster")).files())


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    """Of another CA."""
    return load_tls(Authority(tmp_path_factory.mktemp("stranger")).files())


@dataclass(slots=True)
class Server:
    session: aiohttp.ClientSession
    tls_port: int
    plain_port: int
    served: list[WorkerToGateway] = field(default_factory=list[WorkerToGateway])
    refused: list[Credential] = field(default_factory=list[Credential])

    async def kinds_refused(self) -> set[Credential]:
        return set(self.refused)

    async def dial(self, port: int, tls: Tls | ssl.SSLContext | None, secret: str = SECRET) -> Channel[GatewayToWorker]:
        context = tls.dialler if isinstance(tls, Tls) else tls
        url = f"{'http' if tls is None else 'https'}://127.0.0.1:{port}/channel"
        return await dial(self.session, url, worker_codec(), secret=secret, timeout_s=DEADLINE_S, tls=context)


@asynccontextmanager
async def serving(tls: Tls) -> AsyncGenerator[Server]:
    """One endpoint that wants TLS, on a port that speaks it and on one that does not, as a gateway's."""
    acceptor = Acceptor(
        gateway_codec(), secret=SECRET, max_connections=8, needs_tls=True, on_refused=lambda why: refused.append(why)
    )
    served: list[WorkerToGateway] = []
    refused: list[Credential] = []

    async def answer(channel: Channel[WorkerToGateway]) -> None:
        with contextlib.suppress(PeerLost):
            while True:
                served.append(await channel.receive())
                channel.send(GatewayHeartbeat(sender=Incarnation(7)))

    async def handle(request: web.Request) -> web.StreamResponse:
        return await acceptor.accept(request, answer)

    app = web.Application()
    app.router.add_get("/channel", handle)
    runner = web.AppRunner(app, handle_signals=False, shutdown_timeout=1.0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    plain_port: int = runner.addresses[0][1]
    try:
        async with (
            listening_in_tls(
                runner, "127.0.0.1", 0, tls.listener, on_refused=lambda: refused.append(Credential.CERTIFICATE)
            ) as tls_port,
            aiohttp.ClientSession() as session,
        ):
            yield Server(session, tls_port, plain_port, served, refused)
    finally:
        await runner.cleanup()


async def is_served(channel: Channel[GatewayToWorker]) -> bool:
    channel.send(LEAVE)
    answer = await asyncio.wait_for(channel.receive(), DEADLINE_S)
    await channel.close()
    return isinstance(answer, GatewayHeartbeat)


async def test_ends_with_certificates_of_one_authority_exchange_messages(tls: Tls) -> None:
    async with serving(tls) as server:
        assert await is_served(await server.dial(server.tls_port, tls))
        assert server.refused == []


async def test_secret_is_asked_for_on_top_of_the_certificate(tls: Tls) -> None:
    async with serving(tls) as server:
        with pytest.raises(AuthenticationError, match="cluster secret"):
            await server.dial(server.tls_port, tls, secret="wrong")
        assert (server.served, server.refused) == ([], [Credential.SECRET])


@pytest.mark.parametrize("port", ["tls_port", "plain_port"])
async def test_plain_dialler_is_refused_and_both_ends_say_what_to_do(
    tls: Tls, port: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(tls) as server:
        with pytest.raises(AuthenticationError, match=r"in TLS only; start both ends with --tls-cert"):
            await server.dial(getattr(server, port), None)
        assert (server.served, server.refused) == ([], [Credential.CERTIFICATE])
    assert "TLS" in caplog.text


async def test_dialler_with_a_certificate_refuses_a_plain_listener_and_sends_nothing(tls: Tls) -> None:
    async with serving(tls) as server:
        with pytest.raises(AuthenticationError, match="does not speak TLS, and we have --tls-cert"):
            await server.dial(server.plain_port, tls)
        with pytest.raises(AuthenticationError, match="does not speak TLS"):
            plain_url = f"http://127.0.0.1:{server.plain_port}/channel"
            await dial(server.session, plain_url, worker_codec(), secret=None, timeout_s=DEADLINE_S, tls=tls.dialler)
        assert server.served == []


async def test_certificate_of_another_authority_is_refused_by_the_dialler(tls: Tls, stranger: Tls) -> None:
    async with serving(tls) as server:
        with pytest.raises(AuthenticationError, match=r"certificate of .* is refused: self-signed"):
            await server.dial(server.tls_port, stranger)
        assert server.served == []


@pytest.mark.parametrize("certificate", ["none", "a stranger's"])
async def test_certificate_of_another_authority_or_none_is_refused_by_the_listener(
    tls: Tls, stranger: Tls, certificate: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The dialler believes anybody, as one would that means harm."""
    credulous = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    credulous.check_hostname = False
    credulous.verify_mode = ssl.CERT_NONE
    if certificate != "none":
        credulous.load_cert_chain(stranger.files.cert, stranger.files.key)
    async with serving(tls) as server:
        with pytest.raises(PeerLost, match="https://"):
            await server.dial(server.tls_port, credulous)
        await until(server.kinds_refused, lambda kinds: kinds == {Credential.CERTIFICATE})
        assert server.served == []
    assert "peer_without_certificate peer=127.0.0.1" in caplog.text


async def test_older_tls_is_refused(tls: Tls) -> None:
    older = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    older.check_hostname = False
    older.maximum_version = ssl.TLSVersion.TLSv1_2
    older.load_verify_locations(cafile=tls.files.ca)
    older.load_cert_chain(tls.files.cert, tls.files.key)
    async with serving(tls) as server:
        with pytest.raises((AuthenticationError, PeerLost)):
            await server.dial(server.tls_port, older)
        await until(server.kinds_refused, lambda kinds: kinds == {Credential.CERTIFICATE})
        assert server.served == []


async def test_handshakes_that_nobody_finishes_are_bounded_and_end_in_time(
    tls: Tls, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tls_listener, "MAX_HANDSHAKES", 2)
    monkeypatch.setattr(tls_listener, "HANDSHAKE_TIMEOUT_S", 0.3)
    caplog.set_level(logging.WARNING)
    async with serving(tls) as server:
        silent = [await asyncio.open_connection("127.0.0.1", server.tls_port) for _ in range(3)]
        ends = [asyncio.wait_for(reader.read(), DEADLINE_S) for reader, _ in silent]
        assert await asyncio.gather(*ends) == [b""] * 3
        for _, writer in silent:
            writer.close()

        await until(server.kinds_refused, lambda kinds: kinds == {Credential.CERTIFICATE})
        assert await is_served(await server.dial(server.tls_port, tls))
    assert caplog.text.count("no TLS handshake within") == 2
