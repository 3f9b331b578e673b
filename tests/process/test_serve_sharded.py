"""Real workers of several ranks: bytes and tokens as without any sharding, requests on every data parallel rank, and
what becomes of a worker whose rank dies."""

import os
import re
import signal
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
import pytest_asyncio
from tests.process.commands_under_test import START_TIMEOUT_S, Command, cluster
from tests.process.deployment_under_test import (
    API_KEY,
    CHUNK_TOKENS,
    SECRET,
    Running,
    deployment,
    token_ids_in,
)
from tests.process.gateway_under_test import until

from pdserve.bench.api_client import ApiClient
from pdserve.bench.handoff_check import Captured, Prober, compare
from pdserve.bench.tiny_models import prepare_tiny
from pdserve.config.role import Role
from pdserve.model.source import ModelSource

pytestmark = pytest.mark.asyncio(loop_scope="session")

KV_TOKEN_BYTES = 30 * 2 * 3 * 64 * 4
TINY_TOKEN_BYTES = 768
"""Latents of tiny-deepseek."""
RANK_DEATH_TIMEOUT_S = 15.0


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def three_to_two(model: ModelSource) -> AsyncGenerator[Running]:
    """A prefill worker of three ranks, a decode worker of two data parallel ranks."""
    async with deployment(model, num_prefill=1, num_decode=1, prefill_tp=3, decode_dp=2) as running:
        yield running


def prober(running: Running) -> Prober:
    return Prober(ApiClient(running.session, running.url, api_key=API_KEY), running.session, secret=SECRET)


async def hand_over(running: Running, prompt: list[int]) -> Captured:
    captured = await prober(running).hand_over(prompt)
    assert await running.metric("pdserve:prefill_local_total", worker="decode-0") == 0
    return captured


@pytest.mark.parametrize("num_tokens", [16, 17, 2 * CHUNK_TOKENS + 1])
async def test_kv_put_together_from_three_ranks_equals_that_of_one(
    three_to_two: Running, colocated: Running, text_ids: list[int], num_tokens: int
) -> None:
    """H8 between shardings: the reference has one rank everywhere."""
    prompt = text_ids[11 : 11 + num_tokens]
    handed_over = await hand_over(three_to_two, prompt)
    local = await prober(colocated).compute_locally(prompt)
    comparison = compare(len(prompt), handed_over, local, None)
    assert comparison.kv_bytes == (len(prompt) - 1) * KV_TOKEN_BYTES
    assert (comparison.num_mismatched_bytes, comparison.equals_colocated) == (0, True)


async def test_streams_are_spread_over_data_parallel_ranks(
    three_to_two: Running, colocated: Running, text_ids: list[int]
) -> None:
    """Streams too long to end by themselves; they are cancelled once both ranks were seen to run one."""
    expected = await colocated.complete(text_ids[:40], max_tokens=50, ignore_eos=True)
    streams = [await three_to_two.stream(text_ids[:40], max_tokens=2000) for _ in range(2)]
    await until(
        three_to_two.workers,
        lambda workers: [rank["num_running"] for rank in workers["decode-0"]["ranks"]] == [1, 1],
        timeout_s=START_TIMEOUT_S,
    )
    for stream in streams:
        token_ids: tuple[int, ...] = ()
        while len(token_ids) < 50:
            token_ids += token_ids_in((await anext(stream)).choices[0])
        assert token_ids[:50] == expected.token_ids
        await stream.close()
    await three_to_two.until_idle()


async def test_latents_equal_those_of_one_rank_on_every_replica(text_ids: list[int]) -> None:
    """One of two source replicas writes to each data parallel rank, and one source to both replicas."""
    model = ModelSource(dir=prepare_tiny("tiny-deepseek"), name="tiny-deepseek")
    prompts = [text_ids[:2], text_ids[:17], text_ids[: CHUNK_TOKENS + 9]]
    async with deployment(model, num_colocated=1) as running:
        local = [await prober(running).compute_locally(prompt) for prompt in prompts]
    for prefill_tp, decode_tp, decode_dp in ((2, 1, 2), (1, 2, 1)):
        async with deployment(
            model, num_prefill=1, num_decode=1, prefill_tp=prefill_tp, decode_tp=decode_tp, decode_dp=decode_dp
        ) as running:
            for prompt, reference in zip(prompts, local, strict=True):
                comparison = compare(len(prompt), await hand_over(running, prompt), reference, None)
                assert comparison.kv_bytes == decode_tp * (len(prompt) - 1) * TINY_TOKEN_BYTES
                assert (comparison.num_mismatched_bytes, comparison.equals_colocated) == (0, True)


async def test_worker_whose_rank_dies_says_which_and_leaves_nothing_behind(
    model: ModelSource, tmp_path: Path, text_ids: list[int]
) -> None:
    async with cluster(model, tmp_path) as workers:
        running = workers.running
        decode = await workers.start_worker("d0", Role.DECODE, "--tensor-parallel-size", "3")
        await until(running.workers, lambda found: found.keys() == {"d0"}, timeout_s=START_TIMEOUT_S)
        ranks = rank_pids(decode)
        assert len(ranks) == 3
        stream = await running.stream(text_ids[:20], max_tokens=200)
        await anext(stream)
        os.kill(ranks[1], signal.SIGKILL)
        assert await decode.wait(timeout_s=RANK_DEATH_TIMEOUT_S) == 1
        assert re.search(rf"rank \d .*{ranks[1]}.* by SIGKILL", decode.stderr), decode.stderr
        await decode.until_gone()
        await workers.until_left("d0", timeout_s=RANK_DEATH_TIMEOUT_S)


def rank_pids(worker: Command) -> list[int]:
    return [pid for pid in worker.descendants() if b"pdserve.engine.rank" in Path(f"/proc/{pid}/cmdline").read_bytes()]
