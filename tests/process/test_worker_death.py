"""Workers killed or stopped amid their work: what depended on them fails over or fails clearly, nothing else (H10)."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncGenerator

import pytest
import pytest_asyncio
from tests.process.commands_under_test import Cluster, cluster
from tests.process.deployment_under_test import CHUNK_TOKENS, LEASE_S, Running, token_ids_in, token_ids_of
from tests.process.gateway_under_test import until

from pdserve.config.role import Role
from pdserve.model.source import ModelSource

pytestmark = pytest.mark.asyncio(loop_scope="session")

LOST_TIMEOUT_S = 5.0
PUSH_TIMEOUT_S = 30.0
LONG_TOKENS = 5 * CHUNK_TOKENS + 20
"""Several passes: when the first has been pushed, the others are still to be computed."""
NUM_ANSWER_TOKENS = 60


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def workers(model: ModelSource, tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Cluster]:
    """The tests come in an order in which few workers have to be started anew: each costs some seconds."""
    async with cluster(model, tmp_path_factory.mktemp("commands")) as started:
        yield started


async def until_pushing(running: Running, *, since: float) -> None:
    """Wait until `p0` has pushed a first part of a prompt."""
    await until(
        lambda: running.metric("pdserve:bytes_pushed_total", worker="p0"),
        lambda num_bytes: num_bytes > since,
        timeout_s=PUSH_TIMEOUT_S,
    )


async def test_prefill_worker_that_stands_still_is_left_after_its_lease_and_taken_back(
    workers: Cluster, text_ids: list[int]
) -> None:
    running = workers.running
    await workers.require(p0=Role.PREFILL, d0=Role.DECODE)
    expected = await running.complete(text_ids[:LONG_TOKENS], max_tokens=8)
    pushed = await running.metric("pdserve:bytes_pushed_total", worker="p0")
    failed = await running.metric("pdserve:handoffs_total", worker="d0", outcome="failed")
    amid = asyncio.create_task(running.complete(text_ids[:LONG_TOKENS], max_tokens=8))
    await until_pushing(running, since=pushed)
    workers.worker("p0").process.send_signal(signal.SIGSTOP)
    try:
        assert await amid == expected
        assert await running.metric("pdserve:handoffs_total", worker="d0", outcome="failed") == failed + 1
        await workers.until_left("p0", timeout_s=LEASE_S + LOST_TIMEOUT_S)
        assert await running.complete(text_ids[:50], max_tokens=4)
        await running.until_idle()
    finally:
        workers.worker("p0").process.send_signal(signal.SIGCONT)
    await workers.require(p0=Role.PREFILL, d0=Role.DECODE)
    remote = await running.metric("pdserve:prefills_total", place="remote")
    assert await running.complete(text_ids[:LONG_TOKENS], max_tokens=8) == expected
    assert await running.metric("pdserve:prefills_total", place="remote") == remote + 1


async def test_prefill_worker_killed_amid_a_push_is_done_without_until_one_of_its_name_is_there(
    workers: Cluster, text_ids: list[int]
) -> None:
    running = workers.running
    await workers.require(p0=Role.PREFILL, d0=Role.DECODE)
    expected = await running.complete(text_ids[:LONG_TOKENS], max_tokens=8)
    expected_stream = await running.complete(text_ids[:40], max_tokens=100, ignore_eos=True)
    failed = await running.metric("pdserve:handoffs_total", worker="d0", outcome="failed")
    incarnation = (await running.workers())["p0"]["incarnation"]

    stream = await running.stream(text_ids[:40], max_tokens=100)
    first = token_ids_in((await anext(stream)).choices[0])
    pushed = await running.metric("pdserve:bytes_pushed_total", worker="p0")
    amid = asyncio.create_task(running.complete(text_ids[:LONG_TOKENS], max_tokens=8))
    await until_pushing(running, since=pushed)
    await workers.worker("p0").kill()

    assert await amid == expected
    assert first + await token_ids_of(stream) == expected_stream.token_ids
    await running.until_idle()
    assert await running.metric("pdserve:handoffs_total", worker="d0", outcome="failed") == failed + 1
    assert await running.metric("pdserve:prefill_local_total", worker="d0", reason="handoff_failed") == failed + 1

    await workers.until_left("p0", timeout_s=LOST_TIMEOUT_S)
    local = await running.metric("pdserve:prefill_local_total", worker="d0", reason="no_prefill_worker")
    assert await running.complete(text_ids[:LONG_TOKENS], max_tokens=8) == expected
    assert await running.metric("pdserve:prefill_local_total", worker="d0", reason="no_prefill_worker") == local + 1

    await workers.require(p0=Role.PREFILL, d0=Role.DECODE)
    assert (await running.workers())["p0"]["incarnation"] != incarnation
    assert await running.complete(text_ids[:LONG_TOKENS], max_tokens=8) == expected
    assert await running.metric("pdserve:bytes_pushed_total", worker="p0") > (LONG_TOKENS - 1) * 46_080


async def test_decode_worker_killed_before_the_first_token_is_replaced_by_another(
    workers: Cluster, text_ids: list[int]
) -> None:
    running = workers.running
    await workers.require(p0=Role.PREFILL, d0=Role.DECODE, d1=Role.DECODE)
    expected = await running.complete(text_ids[:LONG_TOKENS], max_tokens=8, ignore_eos=True)
    await running.until_idle()
    retries = await running.metric("pdserve:request_retries_total")
    pushed = await running.metric("pdserve:bytes_pushed_total", worker="p0")

    async def ask() -> tuple[int, ...]:
        return await token_ids_of(await running.stream(text_ids[:LONG_TOKENS], max_tokens=8))

    amid = asyncio.create_task(ask())
    await until_pushing(running, since=pushed)
    # Idle workers take turns, so either may have it; it holds the pages.
    free_pages = {name: await running.metric("pdserve:free_pages", worker=name) for name in ("d0", "d1")}
    await workers.worker(min(free_pages, key=lambda name: free_pages[name])).kill()
    assert await amid == expected.token_ids
    assert await running.metric("pdserve:request_retries_total") == retries + 1
    await running.until_idle()


async def test_answer_goes_on_from_another_worker_when_the_engine_of_its_own_dies(
    workers: Cluster, text_ids: list[int]
) -> None:
    running = workers.running
    await workers.require(p0=Role.PREFILL, d0=Role.DECODE, d1=Role.DECODE)
    expected = await running.complete(text_ids[:40], max_tokens=NUM_ANSWER_TOKENS, ignore_eos=True)
    await running.until_idle()
    stream = await running.stream(text_ids[:40], max_tokens=NUM_ANSWER_TOKENS)
    first = token_ids_in((await anext(stream)).choices[0])
    ((work,),) = [request["works"] for request in (await running.ledger())["requests"]]
    worker = workers.worker(work["worker_id"])
    for pid in worker.descendants():
        if pid != worker.process.pid:
            os.kill(pid, signal.SIGKILL)
    assert first + await token_ids_of(stream) == expected.token_ids
    assert await worker.wait() == 1
    assert "ended by SIGKILL" in worker.stderr
    await running.until_idle()


async def sampled_choices(running: Running, prompt: list[int]) -> list[tuple[int, ...]]:
    """Two answers that are not greedy, whole."""
    completion = await running.client.completions.create(
        model="default",
        prompt=prompt,
        n=2,
        seed=7,
        temperature=1.0,
        max_tokens=NUM_ANSWER_TOKENS,
        extra_body={"return_token_ids": True, "ignore_eos": True},
    )
    return [token_ids_in(choice) for choice in completion.choices]


async def test_answers_of_a_decode_worker_that_is_killed_go_on_from_another_as_if_nothing_had_happened(
    workers: Cluster, text_ids: list[int]
) -> None:
    running = workers.running
    await workers.require(p0=Role.PREFILL, d0=Role.DECODE, d1=Role.DECODE)
    prompt = text_ids[:CHUNK_TOKENS]
    expected_stream = await running.complete(prompt, max_tokens=NUM_ANSWER_TOKENS, ignore_eos=True)
    expected_choices = await sampled_choices(running, prompt)
    await running.until_idle()
    retries = await running.metric("pdserve:request_retries_total")

    # The least loaded one is asked: each has a stream, and a request for two answers.
    streams = [await running.stream(prompt, max_tokens=NUM_ANSWER_TOKENS) for _ in range(2)]
    choices = [asyncio.create_task(sampled_choices(running, prompt)) for _ in range(2)]
    told = [token_ids_in((await anext(stream)).choices[0]) for stream in streams]
    for index, stream in enumerate(streams):
        while len(told[index]) < NUM_ANSWER_TOKENS // 4:
            told[index] += token_ids_in((await anext(stream)).choices[0])
    await workers.worker("d0").kill()

    answers = await asyncio.gather(*map(token_ids_of, streams))
    assert [told[index] + answer for index, answer in enumerate(answers)] == [expected_stream.token_ids] * 2
    assert await asyncio.gather(*choices) == [expected_choices] * 2
    assert await running.metric("pdserve:request_retries_total") == retries + 2
    await running.until_idle()


async def test_only_decode_worker_killed_amid_a_stream_ends_it_with_an_error_event(
    workers: Cluster, text_ids: list[int]
) -> None:
    running = workers.running
    await workers.require(p0=Role.PREFILL, d1=Role.DECODE)
    body = {"model": "default", "prompt": text_ids[:40], "max_tokens": 2000, "ignore_eos": True, "stream": True}
    async with running.session.post(f"{running.url}/v1/completions", json=body) as response:
        assert response.status == 200
        first = await response.content.readline()
        await workers.worker("d1").kill()
        async with asyncio.timeout(LOST_TIMEOUT_S):
            rest = await response.content.read()
    events = [line for line in rest.split(b"\n") if line]
    assert b"choices" in first and b"[DONE]" not in rest
    assert json.loads(events[-1].removeprefix(b"data: "))["error"]["code"] == "worker_lost"
    await running.until_idle()
    assert workers.worker("p0").is_running
