"""Real gateways and workers with real weights, as child processes, and what a test asks them."""

import os
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, cast

import aiohttp
import openai
from openai.types import Completion, CompletionChoice
from tests.process.gateway_under_test import until

from pdserve.bench.exposition import metric_total
from pdserve.cli.speculation import speculation_flags
from pdserve.config.deployment import DeploymentRequest, place_workers
from pdserve.config.speculation import Speculation
from pdserve.launch.deployment import DeploymentSettings, LocalDeployment
from pdserve.model.source import ModelSource

API_KEY = "sk-of-the-tests"
SECRET = "secret of the tests"
CHUNK_TOKENS = 64
LEASE_S = 4.0
KV_TOKENS = 4096

WORKER_FLAGS = (
    *("--chunk-tokens", str(CHUNK_TOKENS), "--max-running", "16", "--kv-tokens", str(KV_TOKENS)),
    *("--lease", str(LEASE_S), "--threads", "1", "--capture-kv"),
)
"""One thread: how a product is split over threads decides its last bit. Small chunks: a prompt soon has several."""

IDLE_TIMEOUT_S = 15.0

AnswerStream = openai.AsyncStream[Completion]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None
    num_prompt_tokens: int
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A gateway with its workers, wherever they came from."""

    url: str
    session: aiohttp.ClientSession
    client: openai.AsyncOpenAI

    async def complete(self, prompt: str | list[int], *, max_tokens: int, **fields: Any) -> Answer:
        """Not streamed, with token ids; greedy unless `fields` say otherwise."""
        completion = await self.client.completions.create(
            model="default",
            prompt=prompt,
            max_tokens=max_tokens,
            extra_body={"return_token_ids": True, "temperature": 0, **fields},
        )
        choice, usage = completion.choices[0], completion.usage
        assert usage is not None
        return Answer(
            text=choice.text,
            token_ids=token_ids_in(choice),
            finish_reason=choice.finish_reason,
            num_prompt_tokens=usage.prompt_tokens,
            num_tokens=usage.completion_tokens,
        )

    async def stream(self, prompt: str | list[int], *, max_tokens: int) -> AnswerStream:
        """A greedy stream of chunks that carry their token ids."""
        return await self.client.completions.create(
            model="default",
            prompt=prompt,
            max_tokens=max_tokens,
            temperature=0,
            stream=True,
            extra_body={"return_token_ids": True, "ignore_eos": True},
        )

    async def workers(self) -> dict[str, dict[str, Any]]:
        """`GET /workers`, by worker id."""
        async with self.session.get(f"{self.url}/workers") as response:
            return {worker["worker_id"]: worker for worker in (await response.json())["workers"]}

    async def metric(self, name: str, *, worker: str | None = None, **labels: str) -> float:
        """The sum of a metric's samples with these labels, of a worker or of the gateway; 0 when there is none."""
        url = self.url if worker is None else (await self.workers())[worker]["url"]
        headers = {"Authorization": f"Bearer {SECRET}"}
        async with self.session.get(f"{url}/metrics", headers=headers) as response:
            assert response.status == 200
            return metric_total(await response.text(), name, **labels)

    async def ledger(self, *, worker: str | None = None) -> dict[str, Any]:
        """`GET /debug/ledger` of a worker or of the gateway."""
        url = self.url if worker is None else (await self.workers())[worker]["url"]
        headers = {"Authorization": f"Bearer {SECRET}"}
        async with self.session.get(f"{url}/debug/ledger", headers=headers) as response:
            assert response.status == 200
            return await response.json()

    async def until_idle(self) -> None:
        """Wait until nothing is left of any request, and see that nothing leaked (rule H7)."""
        await until(self._loads, lambda loads: all(map(is_idle, loads)), timeout_s=IDLE_TIMEOUT_S)
        ledgers = await until(self._ledgers, lambda ledgers: all(map(is_empty, ledgers)), timeout_s=IDLE_TIMEOUT_S)
        assert [leak for ledger in ledgers for leak in ledger["leaks"]] == []

    async def _ledgers(self) -> list[dict[str, Any]]:
        return [await self.ledger(), *[await self.ledger(worker=worker) for worker in await self.workers()]]

    async def _loads(self) -> list[dict[str, int]]:
        return [load for worker in (await self.workers()).values() for load in worker["ranks"]]


def is_idle(load: dict[str, int]) -> bool:
    busy = ("num_running", "num_waiting", "num_waiting_tokens", "num_quarantined_pages")
    return load["num_free_pages"] == load["num_pages"] and not any(load[field] for field in busy)


def is_empty(ledger: dict[str, Any]) -> bool:
    """Nobody owns anything: of a worker, no page, slot or immediate; of a gateway, no request."""
    return not ledger.get("requests") and not any(rank["owners"] for rank in ledger.get("ranks", []))


@asynccontextmanager
async def connected(url: str, *, api_key: str = API_KEY) -> AsyncGenerator[Running]:
    """Clients of a gateway that runs."""
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(aiohttp.ClientSession())
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=api_key, max_retries=0, timeout=60.0)
        stack.push_async_callback(client.close)
        yield Running(url=url, session=session, client=client)


@asynccontextmanager
async def deployment(
    model: ModelSource,
    *,
    num_prefill: int = 0,
    num_decode: int = 0,
    num_colocated: int = 0,
    prefill_tp: int = 1,
    decode_tp: int = 1,
    decode_dp: int = 1,
    provider: str = "tcp",
    speculation: Speculation | None = None,
) -> AsyncGenerator[Running]:
    """What `pdserve serve` starts, guarded by key and secret; idle again at the end."""
    places = place_workers(
        DeploymentRequest(
            num_prefill=num_prefill,
            num_decode=num_decode,
            num_colocated=num_colocated,
            available_cpus=tuple(sorted(os.sched_getaffinity(0))[:2]),
            prefill_tp=prefill_tp,
            decode_tp=decode_tp,
            decode_dp=decode_dp,
        )
    )
    settings = DeploymentSettings(
        model_dir=str(model.dir),
        model_name=model.name,
        places=places,
        worker_arguments=(*WORKER_FLAGS, "--provider", provider, *speculation_flags(speculation)),
        environment={"PDSERVE_API_KEY": API_KEY, "PDSERVE_CLUSTER_SECRET": SECRET},
    )
    async with LocalDeployment(settings) as started, connected(started.url) as running:
        yield running
        await running.until_idle()


def token_ids_in(choice: CompletionChoice) -> tuple[int, ...]:
    return tuple(cast("list[int]", choice.to_dict()["token_ids"]))


async def token_ids_of(stream: AnswerStream) -> tuple[int, ...]:
    """Of the chunks that are left."""
    return tuple([token_id async for chunk in stream for token_id in token_ids_in(chunk.choices[0])])
