"""A gateway from its start to its stop, with a tokenizer from files."""

import asyncio
import json
import socket
import ssl
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest
from tests.process.gateway_under_test import until
from tests.process.scripted_worker import ScriptedWorker, answering, join_message, joined, silent
from tests.pure.certificates import Authority

from pdserve.config.tls import load_api_tls, load_tls
from pdserve.errors import AuthenticationError, ConfigError, PeerLost
from pdserve.gateway.process import run_gateway
from pdserve.gateway.settings import GatewaySettings
from pdserve.wire.channel import dial
from pdserve.wire.cluster import Generate
from pdserve.wire.codec import worker_codec


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    """A tokenizer that knows two words, and no chat template."""
    tokenizer: dict[str, object] = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "Whitespace"},
        "model": {"type": "WordLevel", "vocab": {"[UNK]": 0, "hello": 1, "world": 2}, "unk_token": "[UNK]"},
        **dict.fromkeys(("truncation", "padding", "normalizer", "post_processor", "decoder")),
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 0}))
    return tmp_path


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@asynccontextmanager
async def running(settings: GatewaySettings) -> AsyncGenerator[tuple[str, asyncio.Event]]:
    """The gateway's URL and the event that stops it; it has stopped at the end."""
    stop, ready = asyncio.Event(), asyncio.Event()
    task = asyncio.create_task(run_gateway(settings, stop, ready.set))
    await asyncio.wait_for(ready.wait(), 10)
    try:
        yield f"http://{settings.host}:{settings.port}", stop
    finally:
        stop.set()
        await asyncio.wait_for(task, 10)


def settings_of(model_dir: Path, *, drain_timeout_s: float = 20.0) -> GatewaySettings:
    return GatewaySettings(model_name="smol", model_dir=model_dir, port=free_port(), drain_timeout_s=drain_timeout_s)


async def test_run_gateway_answers_until_it_is_stopped(model_dir: Path) -> None:
    async with aiohttp.ClientSession() as session:
        async with running(settings_of(model_dir)) as (url, _), joined(url, join_message("d0")) as worker:
            body = {"model": "default", "prompt": "hello world"}
            async with session.post(f"{url}/v1/completions", json=body) as response:
                assert (await response.json())["choices"][0]["text"] == "Hello world"
            assert worker.generates.get_nowait().prompt_token_ids == (1, 2)
            chat = {"model": "default", "messages": [{"role": "user", "content": "hello"}]}
            async with session.post(f"{url}/v1/chat/completions", json=chat) as response:
                assert response.status == 400
                assert "no chat template" in (await response.json())["error"]["message"]
        with pytest.raises(aiohttp.ClientConnectionError):
            await session.get(f"{url}/live")


async def test_run_gateway_answers_clients_in_tls_and_workers_with_a_certificate(model_dir: Path) -> None:
    authority = Authority(model_dir)
    api, tls = authority.files("api"), load_tls(authority.files())
    settings = replace(
        settings_of(model_dir),
        api_tls=load_api_tls(cert=api.cert, key=api.key),
        tls=tls,
        control_port=free_port(),
    )
    client = ssl.create_default_context(cafile=api.ca)
    client.check_hostname = False
    join_url = f"https://127.0.0.1:{settings.control_port}"
    async with aiohttp.ClientSession() as session, running(settings):
        url = f"https://127.0.0.1:{settings.port}"
        with pytest.raises(AuthenticationError, match="in TLS only"):
            await dial(session, f"{url}/cluster", worker_codec(), secret=None, timeout_s=5.0, tls=client)
        async with joined(join_url, join_message("d0"), tls=tls.dialler):
            body = {"model": "default", "prompt": "hello world"}
            async with session.post(f"{url}/v1/completions", json=body, ssl=client) as response:
                assert (await response.json())["choices"][0]["text"] == "Hello world"


@asynccontextmanager
async def connected(settings: GatewaySettings, sent: bytes = b"") -> AsyncGenerator[asyncio.StreamReader]:
    """A client that sends that much, and stays."""
    reader, writer = await asyncio.open_connection(settings.host, settings.port)
    writer.write(sent)
    yield reader
    writer.close()


async def test_run_gateway_ends_a_connection_that_sends_no_request(model_dir: Path) -> None:
    settings = replace(settings_of(model_dir), head_timeout_s=0.1)
    async with running(settings), connected(settings) as answer:
        assert await asyncio.wait_for(answer.read(), 5) == b""


async def test_run_gateway_refuses_requests_over_its_bound_of_connections_and_answers_probes(model_dir: Path) -> None:
    settings = replace(settings_of(model_dir), max_connections=4)
    half_a_body = b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"
    async with aiohttp.ClientSession() as session, running(settings) as (url, _), AsyncExitStack() as clients:

        async def refusal() -> tuple[int, str | None, str]:
            async with session.post(f"{url}/v1/completions", json={"model": "smol", "prompt": "hello"}) as response:
                error = (await response.json())["error"]
                return response.status, response.headers.get("Retry-After"), error["code"]

        async def displaced() -> bool:
            async with session.get(f"{url}/metrics") as response:
                return 'pdserve:connections_ended_total{reason="displaced"}' in await response.text()

        for sent in (b"", *[half_a_body] * 3):
            await clients.enter_async_context(connected(settings, sent))
        await until(refusal, lambda answer: answer == (429, "1", "over_capacity"))
        assert await displaced()


async def test_run_gateway_that_drains_finishes_what_runs_and_refuses_the_rest(model_dir: Path) -> None:
    written = asyncio.Event()

    async def slow(worker: ScriptedWorker, generate: Generate) -> None:
        await written.wait()
        await answering(["Hello", " world"])(worker, generate)

    async with (
        aiohttp.ClientSession() as session,
        running(settings_of(model_dir)) as (url, stop),
        joined(url, join_message("d0"), slow) as worker,
    ):

        async def status(path: str) -> int:
            async with session.get(url + path) as response:
                return response.status

        body = {"model": "smol", "prompt": "hello", "stream": True}
        request = asyncio.create_task(session.post(f"{url}/v1/completions", json=body))
        await asyncio.wait_for(worker.generates.get(), 5)
        stop.set()
        await until(lambda: status("/ready"), lambda answer: answer == 503)
        assert (await status("/health"), await status("/live"), await status("/workers")) == (503, 200, 200)
        async with session.post(f"{url}/v1/completions", json=body) as refused:
            assert (refused.status, refused.headers["Retry-After"]) == (503, "1")
            assert (await refused.json())["error"]["code"] == "shutting_down"
        assert worker.generates.empty()
        written.set()
        async with await asyncio.wait_for(request, 5) as response:
            assert b"[DONE]" in await asyncio.wait_for(response.content.read(), 5)
        await asyncio.wait_for(worker.disconnected.wait(), 5)


@pytest.mark.parametrize("drain_timeout_s", [0.0, 0.1])
async def test_run_gateway_fails_what_runs_after_the_drain_timeout(model_dir: Path, drain_timeout_s: float) -> None:
    async with (
        aiohttp.ClientSession() as session,
        running(settings_of(model_dir, drain_timeout_s=drain_timeout_s)) as (url, stop),
        joined(url, join_message("d0"), silent) as worker,
    ):
        body = {"model": "smol", "prompt": "hello"}
        request = asyncio.create_task(session.post(f"{url}/v1/completions", json=body))
        await asyncio.wait_for(worker.generates.get(), 5)
        stop.set()
        response = await asyncio.wait_for(request, 5)
        assert response.status == 503
        assert (await response.json())["error"]["code"] == "shutting_down"
        await asyncio.wait_for(worker.disconnected.wait(), 5)
        with pytest.raises(PeerLost):
            worker.heartbeat(*worker.loads)


@pytest.mark.parametrize("port", ["taken", 70_000])
async def test_run_gateway_on_a_port_it_can_not_have_is_a_config_error(model_dir: Path, port: int | str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        number = holder.getsockname()[1] if port == "taken" else int(port)
        settings = replace(settings_of(model_dir), port=number)
        with pytest.raises(ConfigError, match=rf"can't listen on 127\.0\.0\.1:{number}: .*; choose") as raised:
            await run_gateway(settings, asyncio.Event(), lambda: None)
        assert "\n" not in raised.value.message


async def test_run_gateway_without_tokenizer_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        await run_gateway(settings_of(tmp_path), asyncio.Event(), lambda: None)
