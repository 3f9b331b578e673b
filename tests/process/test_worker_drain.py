"""Workers that are told to stop amid their work: they finish it, others get what is new, and they end with status 0."""

import asyncio
import signal
from collections.abc import AsyncGenerator

import openai
import pytest
import pytest_asyncio
from tests.process.commands_under_test import END_TIMEOUT_S, Cluster, Command, cluster
from tests.process.deployment_under_test import AnswerStream, token_ids_in, token_ids_of
from tests.process.gateway_under_test import until
from tests.process.test_worker_death import LONG_TOKENS, until_pushing

from pdserve.config.role import Role
from pdserve.model.source import ModelSource

pytestmark = pytest.mark.asyncio(loop_scope="session")

ANSWER_TOKENS = 150
"""Takes long enough that all that is asked meanwhile is asked meanwhile."""

CUT_TIMEOUT_S = 1.0


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def workers(model: ModelSource, tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Cluster]:
    async with cluster(model, tmp_path_factory.mktemp("commands")) as started:
        yield started


async def begun(workers: Cluster, prompt: list[int], *, max_tokens: int) -> tuple[AnswerStream, tuple[int, ...]]:
    """A stream, and the tokens of its first chunk."""
    stream = await workers.running.stream(prompt, max_tokens=max_tokens)
    return stream, token_ids_in((await anext(stream)).choices[0])


async def until_draining(workers: Cluster, name: str) -> None:
    """Wait until the gateway knows."""
    await until(workers.running.workers, lambda shown: shown[name]["draining"])


def tell_to_stop(command: Command) -> None:
    command.process.send_signal(signal.SIGTERM)


async def test_decode_worker_drains_its_streams_while_the_other_takes_what_is_new(
    workers: Cluster, text_ids: list[int]
) -> None:
    running = workers.running
    await workers.require(p0=Role.PREFILL, d0=Role.DECODE, d1=Role.DECODE)
    expected = await running.complete(text_ids[:40], max_tokens=ANSWER_TOKENS, ignore_eos=True)
    await running.until_idle()
    retries = await running.metric("pdserve:request_retries_total")

    stream, first = await begun(workers, text_ids[:40], max_tokens=ANSWER_TOKENS)
    free_pages = {name: await running.metric("pdserve:free_pages", worker=name) for name in ("d0", "d1")}
    leaver, other = sorted(free_pages, key=lambda name: free_pages[name])
    url = (await running.workers())[leaver]["url"]
    tell_to_stop(workers.worker(leaver))
    await until_draining(workers, leaver)
    for path, status in (("/ready", 503), ("/live", 200)):
        async with running.session.get(url + path) as response:
            assert response.status == status
    landed = await running.metric("pdserve:handoffs_total", worker=other, outcome="landed")
    for length in (30, 50):
        await running.complete(text_ids[:length], max_tokens=4, ignore_eos=True)
    assert await running.metric("pdserve:handoffs_total", worker=other, outcome="landed") == landed + 2
    assert workers.worker(leaver).is_running, "the stream ended before what is new was asked: nothing was shown"
    assert first + await token_ids_of(stream) == expected.token_ids
    assert await workers.worker(leaver).wait() == 0
    assert "drain_cut" not in workers.worker(leaver).stderr
    await workers.until_left(leaver, timeout_s=END_TIMEOUT_S)
    assert await running.metric("pdserve:request_retries_total") == retries
    await running.until_idle()


async def test_prefill_worker_drained_amid_a_push_completes_its_handoff(workers: Cluster, text_ids: list[int]) -> None:
    running = workers.running
    await workers.require(p0=Role.PREFILL, d0=Role.DECODE)
    expected = await running.complete(text_ids[:LONG_TOKENS], max_tokens=8)
    outcomes = {"landed": 1, "failed": 0, "refused": 0}
    before = {
        outcome: await running.metric("pdserve:handoffs_total", worker="d0", outcome=outcome) for outcome in outcomes
    }
    pushed = await running.metric("pdserve:bytes_pushed_total", worker="p0")
    amid = asyncio.create_task(running.complete(text_ids[:LONG_TOKENS], max_tokens=8))
    await until_pushing(running, since=pushed)
    tell_to_stop(workers.worker("p0"))
    await until_draining(workers, "p0")
    assert await running.complete(text_ids[:50], max_tokens=4, ignore_eos=True)
    assert await amid == expected
    assert await workers.worker("p0").wait() == 0
    assert "drain_cut" not in workers.worker("p0").stderr
    for outcome, num_more in outcomes.items():
        now = await running.metric("pdserve:handoffs_total", worker="d0", outcome=outcome)
        assert (outcome, now - before[outcome]) == (outcome, num_more)
    await workers.until_left("p0", timeout_s=END_TIMEOUT_S)
    await running.until_idle()


async def test_drain_timeout_cuts_what_runs_and_a_second_signal_cuts_at_once(
    workers: Cluster, text_ids: list[int]
) -> None:
    for flags, num_signals, status in ((("--drain-timeout", str(CUT_TIMEOUT_S)), 1, 0), ((), 2, 130)):
        await workers.require()
        worker = await workers.start_worker("d0", Role.BOTH, *flags)
        await workers.require(d0=Role.BOTH)
        stream, _ = await begun(workers, text_ids[:40], max_tokens=2000)
        tell_to_stop(worker)
        await until_draining(workers, "d0")
        if num_signals == 2:
            tell_to_stop(worker)
        assert await worker.wait() == status
        assert ("drain_cut num_open=1" in worker.stderr) == (num_signals == 1)
        with pytest.raises(openai.APIError):
            await token_ids_of(stream)
