"""The load generator against a server that is not ours, and that is not always well."""

import asyncio
from collections.abc import AsyncGenerator

import aiohttp
import pytest
import pytest_asyncio
from tests.process.gateway_under_test import until
from tests.process.openai_server import MODEL, OtherServer, other_server

from pdserve.bench.load.result import LoadResult, SentRequest
from pdserve.bench.load.run import LoadRunner
from pdserve.bench.load.target import ORDINARY_TOKEN_IDS, Target, look_at
from pdserve.errors import ConfigError
from pdserve.workload.objective import Objective
from pdserve.workload.request import WorkloadRequest

TIMEOUT_S = 10.0


def requests(num_requests: int) -> list[WorkloadRequest]:
    """Of prompts with 5 tokens, 6, and so on."""
    return [
        WorkloadRequest(arrival_s=0.01 * index, num_prompt_tokens=5 + index, num_output_tokens=6)
        for index in range(num_requests)
    ]


@pytest_asyncio.fixture
async def server() -> AsyncGenerator[OtherServer]:
    async with other_server() as running:
        yield running


@pytest_asyncio.fixture
async def session() -> AsyncGenerator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as opened:
        yield opened


async def run(
    session: aiohttp.ClientSession,
    server: OtherServer,
    load: list[WorkloadRequest],
    *,
    stop: asyncio.Event | None = None,
    max_in_flight: int = 100,
    deadline_s: float = TIMEOUT_S,
) -> LoadResult:
    target = await look_at(session, server.url, model=None, api_key=None, text="some text")
    runner = LoadRunner(
        session,
        server.url,
        target,
        max_in_flight=max_in_flight,
        deadline_s=deadline_s,
        api_key=None,
        secret=None,
    )
    finished = await runner.run(
        load, stop or asyncio.Event(), objective=Objective(ttft_s=TIMEOUT_S), seed=3, configuration={"name": "test"}
    )
    assert finished.trace is None
    return finished.result


async def test_look_at_a_plain_server_finds_its_model_and_draws_ordinary_tokens(
    session: aiohttp.ClientSession, server: OtherServer
) -> None:
    assert await look_at(session, server.url, model=MODEL, api_key=None, text="some text") == Target(
        model=MODEL, max_model_len=None, token_ids=ORDINARY_TOKEN_IDS, tokenizes=False, is_pdserve=False
    )


async def test_look_at_a_server_of_another_model_is_refused_with_what_it_serves(
    session: aiohttp.ClientSession, server: OtherServer
) -> None:
    with pytest.raises(ConfigError, match=f"does not serve 'wrong'; it serves: {MODEL}"):
        await look_at(session, server.url, model="wrong", api_key=None, text="some text")


async def test_load_on_a_plain_server_counts_tokens_by_its_usage(
    session: aiohttp.ClientSession, server: OtherServer
) -> None:
    result = await run(session, server, requests(5))
    assert result.summary.num_completed == 5
    assert result.summary.attainment == 1.0
    assert sorted(len(body["prompt"]) for body in server.bodies) == [5, 6, 7, 8, 9]
    assert {(body["model"], body["max_tokens"], body["ignore_eos"]) for body in server.bodies} == {(MODEL, 6, True)}
    for request in result.requests:
        assert (request.finish_reason, request.status, request.error) == ("length", 200, None)
        assert (len(request.token_s), request.num_generated) == (3, 6)
        assert request.due_s <= request.sent_s <= request.token_s[0] <= request.token_s[-1]
        assert request.ended_s is not None
    assert (result.pools, result.handoff) == ({}, {})
    assert result.configuration == {"name": "test"}


async def test_refusals_and_failures_are_kept_as_misses(session: aiohttp.ClientSession, server: OtherServer) -> None:
    server.statuses = {5: 429, 6: 503, 7: 500}
    server.broken = {8}
    result = await run(session, server, requests(5))
    summary = result.summary
    assert (summary.num_requests, summary.num_completed, summary.num_refused, summary.num_failed) == (5, 1, 2, 2)
    assert summary.attainment == pytest.approx(0.2)
    assert [request.status for request in result.requests] == [429, 503, 500, 200, 200]
    broken = result.requests[3]
    assert broken.error is not None and "broke off after 1 tokens" in broken.error
    assert len(broken.token_s) == 1


async def test_request_without_end_fails_at_its_deadline(session: aiohttp.ClientSession, server: OtherServer) -> None:
    server.silent = {5}
    (request,) = (await run(session, server, requests(1), deadline_s=0.5)).requests
    assert request.error == "no whole answer in 0.5 s"
    assert request.ended_s is not None and request.finish_reason is None


async def test_request_over_the_bound_in_flight_is_not_sent_and_failed(
    session: aiohttp.ClientSession, server: OtherServer
) -> None:
    server.silent = {5}
    first, second = (await run(session, server, requests(2), max_in_flight=1, deadline_s=0.5)).requests
    assert first.error == "no whole answer in 0.5 s"
    assert second.error is not None and second.error.startswith("not sent: 1 requests were in flight")
    assert len(server.bodies) <= 1


async def test_load_that_is_stopped_marks_what_was_in_flight_and_leaves_out_the_rest(
    session: aiohttp.ClientSession, server: OtherServer
) -> None:
    server.silent = {5}
    stop = asyncio.Event()
    load = [*requests(1), WorkloadRequest(arrival_s=1e6, num_prompt_tokens=1, num_output_tokens=2)]
    running = asyncio.create_task(run(session, server, load, stop=stop))

    async def num_asked() -> int:
        return len(server.bodies)

    await until(num_asked, bool, timeout_s=TIMEOUT_S)
    stop.set()
    result = await asyncio.wait_for(running, TIMEOUT_S)
    assert [unfinished(request) for request in result.requests] == [True]
    assert result.configuration["cut short"] == "after 1 of 2 requests"
    assert (result.summary.num_completed, result.summary.num_failed, result.summary.attainment) == (0, 0, 0.0)


def unfinished(request: SentRequest) -> bool:
    return request.ended_s is None and request.error is None and request.finish_reason is None


async def test_load_after_the_server_is_gone_fails_request_by_request(session: aiohttp.ClientSession) -> None:
    async with other_server() as server:
        target = await look_at(session, server.url, model=None, api_key=None, text="")
    runner = LoadRunner(session, server.url, target, max_in_flight=9, deadline_s=TIMEOUT_S, api_key=None, secret=None)
    finished = await runner.run(requests(3), asyncio.Event(), objective=Objective(), seed=0, configuration={})
    assert finished.result.summary.num_failed == 3
    assert {request.status for request in finished.result.requests} == {None}
    assert all("can't reach" in (request.error or "") for request in finished.result.requests)
