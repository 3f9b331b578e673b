"""A gateway between a worker that sends nonsense and a client that asks nonsense: it refuses, and goes on serving."""

import asyncio
import contextlib
import json
import logging
import random
from typing import Any

import aiohttp
import pytest
from tests.process.gateway_under_test import RunningGateway, gateway
from tests.process.scripted_worker import answering, join_message, joined
from tests.pure.wire_mutations import BOUNDARY_FLOATS, BOUNDARY_INTS, ODD_TEXTS, Mutator

from pdserve.wire.cluster import GatewayToWorker, Generate, WorkerToGateway
from pdserve.wire.codec import gateway_codec, worker_codec

MESSAGES_A_SEED = 200
BODY: dict[str, Any] = {"model": "smol", "prompt": "x", "max_tokens": 4}
CHAT: dict[str, Any] = {"model": "smol", "messages": [{"role": "user", "content": "x"}], "max_tokens": 4}
ODD_VALUES: list[Any] = [None, True, [], {}, [[]], [{}], {"a": 1}, *BOUNDARY_INTS, *BOUNDARY_FLOATS, *ODD_TEXTS]
FIELDS = [
    "model",
    "prompt",
    "messages",
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "n",
    "seed",
    "stop",
    "stream",
    "stream_options",
    "logprobs",
    "top_logprobs",
    "logit_bias",
    "presence_penalty",
    "frequency_penalty",
    "echo",
    "best_of",
    "suffix",
    "user",
    "tools",
    "tool_choice",
    "response_format",
]


@pytest.mark.parametrize("seed", range(8))
async def test_worker_that_sends_nonsense_breaks_no_other(seed: int, caplog: pytest.LogCaptureFixture) -> None:
    """It joins well, then answers requests with mutations, as often as it is thrown out."""
    caplog.set_level(logging.ERROR)
    rng = random.Random(seed)
    async with gateway(request_timeout_s=2.0) as running:
        num_sent = 0
        while num_sent < MESSAGES_A_SEED:
            num_sent += await speak(running, rng, seed)
        async with joined(running.url, join_message("good"), answering(["fine"])):
            status, body, _ = await running.post("/v1/completions", BODY)
            assert (status, body["choices"][0]["text"]) == (200, "fine")
    assert errors_in(caplog) == []


async def speak(running: RunningGateway, rng: random.Random, seed: int) -> int:
    """One connection, until the gateway ends it or ten messages are sent; returns how many."""
    incarnation = rng.randrange(1 << 62)
    async with running.session.ws_connect(running.url + "/cluster") as connection:
        join = join_message(f"bad-{seed}", incarnation=incarnation)
        await connection.send_bytes(gateway_codec().encode(join))  # pyright: ignore[reportArgumentType]
        client = asyncio.create_task(running.post("/v1/completions", {**BODY, "logprobs": 2}))
        request_ids = await requests_of(connection)
        known = {
            "sender": (incarnation,),
            "request_id": request_ids,
            "worker_id": (join.worker_id,),
            "choice_index": (0,),
        }
        mutator = Mutator(WorkerToGateway, rng, known=known)
        num_sent = 0
        with contextlib.suppress(ConnectionError):
            while num_sent < 10 and not connection.closed:
                await connection.send_bytes(mutator.next())
                num_sent += 1
                await asyncio.sleep(0)
    status, body, _ = await client
    assert status == 200 or "error" in body
    return num_sent


async def requests_of(connection: aiohttp.ClientWebSocketResponse) -> tuple[str, ...]:
    """The id of the request that the gateway sends; none when it refused the worker."""
    async with asyncio.timeout(5.0):
        while True:
            incoming = await connection.receive()
            if incoming.type is not aiohttp.WSMsgType.BINARY:
                return ("none",)
            message: GatewayToWorker = worker_codec().decode(incoming.data, peer="gateway")
            if isinstance(message, Generate):
                return (message.request_id,)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_bodies_with_nonsense_are_answered_or_refused(path: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    rng = random.Random(path)
    good = BODY if path == "/v1/completions" else CHAT
    async with gateway() as running, joined(running.url, join_message("d0"), answering(["fine"])):
        for _ in range(300):
            body = {**good, **{rng.choice(FIELDS): rng.choice(ODD_VALUES) for _ in range(rng.randint(1, 2))}}
            encoded = bytearray(json.dumps(body).encode())
            if rng.random() < 0.2:
                encoded[rng.randrange(len(encoded))] ^= 1 << rng.randrange(8)
            async with running.session.post(running.url + path, data=bytes(encoded)) as response:
                text = await response.text()
                assert response.status < 500, (body, text)
                assert response.status == 200 or "error" in json.loads(text)
    assert errors_in(caplog) == []


def errors_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
