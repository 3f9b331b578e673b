"""Every byte of a handed over KV cache, and the tokens after it, equal those of a local prefill, on each provider."""

from collections.abc import AsyncGenerator

import pytest
import pytest_asyncio
from tests.process.deployment_under_test import API_KEY, CHUNK_TOKENS, SECRET, Running, deployment

from pdserve.bench.api_client import ApiClient
from pdserve.bench.handoff_check import Prober, compare
from pdserve.model.source import ModelSource

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def apart_on_shm(model: ModelSource) -> AsyncGenerator[Running]:
    async with deployment(model, num_prefill=1, num_decode=1, provider="shm") as running:
        yield running


def prober(running: Running) -> Prober:
    return Prober(ApiClient(running.session, running.url, api_key=API_KEY), running.session, secret=SECRET)


async def require_equal(apart: Running, colocated: Running, prompt: list[int]) -> None:
    handed_over = await prober(apart).hand_over(prompt)
    local = await prober(colocated).compute_locally(prompt)
    comparison = compare(len(prompt), handed_over, local, None)
    assert comparison.kv_bytes == (len(prompt) - 1) * 30 * 2 * 3 * 64 * 4
    assert (comparison.num_mismatched_bytes, comparison.equals_colocated) == (0, True)


@pytest.mark.parametrize("num_tokens", [16, 2 * CHUNK_TOKENS + 1])
async def test_kv_handed_over_on_tcp_equals_the_local_one(
    apart: Running, colocated: Running, text_ids: list[int], num_tokens: int
) -> None:
    await require_equal(apart, colocated, text_ids[7 : 7 + num_tokens])


async def test_kv_handed_over_on_shm_equals_the_local_one(
    apart_on_shm: Running, colocated: Running, text_ids: list[int]
) -> None:
    for num_tokens in (2, 17, 3 * CHUNK_TOKENS + 9):
        await require_equal(apart_on_shm, colocated, text_ids[:num_tokens])
    assert await apart_on_shm.metric("pdserve:prefill_local_total", worker="decode-0") == 0
    assert await apart_on_shm.metric("pdserve:handoffs_total", worker="decode-0", outcome="landed") == 3
