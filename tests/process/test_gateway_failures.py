"""Workers that die, refuse, lie or fall silent, and clients that leave or do not read."""

import asyncio
import json
import socket
from contextlib import AsyncExitStack
from typing import Any

import openai
import pytest
from tests.process.gateway_under_test import RunningGateway, gateway, until
from tests.process.scripted_worker import (
    DEFAULT_LOAD,
    Script,
    ScriptedWorker,
    answering,
    dying,
    join_message,
    joined,
    refusing,
    silent,
    starting,
)

from pdserve.ids import Incarnation, RequestId
from pdserve.wire.cluster import Abort, Delta, FailureKind, FinishReason, Generate, PrefillPlace, Told

BODY = {"model": "smol", "prompt": "x"}


async def streamed(running: RunningGateway, body: dict[str, Any]) -> list[str]:
    """The events of a streamed answer, without their `data: `."""
    async with running.session.post(running.url + "/v1/completions", json={**body, "stream": True}) as response:
        assert response.status == 200
        text = (await response.read()).decode()
    return [event.removeprefix("data: ") for event in text.split("\n\n") if event]


def failing_after(texts: list[str]) -> Script:
    """Some deltas, then the connection is gone."""

    async def script(worker: ScriptedWorker, generate: Generate) -> None:
        await starting(texts)(worker, generate)
        await asyncio.sleep(0.05)
        worker.die()

    return script


@pytest.mark.parametrize("stream", [False, True])
async def test_worker_lost_before_the_first_token_is_retried_elsewhere(stream: bool) -> None:
    async with (
        gateway() as running,
        joined(running.url, join_message("a"), dying) as first,
        joined(running.url, join_message("b"), answering(["fine"])) as second,
    ):
        client = running.client()
        if stream:
            chunks = await client.completions.create(model="smol", prompt="x", stream=True)
            text = "".join([chunk.choices[0].text async for chunk in chunks])
        else:
            text = (await client.completions.create(model="smol", prompt="x")).choices[0].text
        assert text == "fine"
        tried, retried = first.generates.get_nowait(), second.generates.get_nowait()
        assert tried.request_id != retried.request_id
        assert tried.sampling == retried.sampling
        assert await running.metric("pdserve:request_retries_total") == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_answer_whose_worker_is_lost_goes_on_from_another(stream: bool) -> None:
    async with (
        gateway() as running,
        joined(running.url, join_message("a"), failing_after(["half", " an"])),
        joined(running.url, join_message("b"), answering([" answer"])) as second,
    ):
        client = running.client()
        if stream:
            chunks = await client.completions.create(
                model="smol", prompt="x", stream=True, stream_options={"include_usage": True}
            )
            events = [chunk async for chunk in chunks]
            text, usage = "".join(event.choices[0].text for event in events[:-1]), events[-1].usage
        else:
            answer = await client.completions.create(model="smol", prompt="x")
            text, usage = answer.choices[0].text, answer.usage
        assert text == "half an answer"
        assert usage is not None and usage.completion_tokens == 3
        assert second.generates.get_nowait().told == (Told(token_ids=(1, 1), num_text_chars=7, num_entries=2),)


async def test_worker_lost_mid_stream_without_another_ends_it_with_an_error_event_and_no_done() -> None:
    async with gateway() as running, joined(running.url, join_message("a"), failing_after(["half", " an"])):
        *texts, last = [json.loads(event) for event in await streamed(running, BODY)]
        assert "".join(event["choices"][0]["text"] for event in texts) == "half an"
        assert last["error"]["code"] == "worker_lost"


async def test_worker_lost_mid_stream_is_an_error_of_openais_client() -> None:
    async with gateway() as running, joined(running.url, join_message("a"), failing_after(["half"])):
        stream = await running.client().completions.create(model="smol", prompt="x", stream=True)
        with pytest.raises(openai.APIError, match="worker a was lost"):
            async for _ in stream:
                pass


async def test_retries_are_bounded() -> None:
    async with gateway() as running, AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(joined(running.url, join_message(name), dying)) for name in "abcd"]
        status, answer, _ = await running.post("/v1/completions", BODY)
        assert (status, answer["error"]["code"]) == (503, "worker_lost")
        assert sorted(worker.generates.qsize() for worker in workers) == [0, 1, 1, 1]


async def test_refusing_workers_are_each_asked_once_then_the_client_gets_429() -> None:
    full = refusing(FailureKind.CAPACITY, retry_after_s=2.0)
    async with (
        gateway() as running,
        joined(running.url, join_message("a"), full) as first,
        joined(running.url, join_message("b"), full) as second,
    ):
        status, _, headers = await running.post("/v1/completions", BODY)
        assert (status, headers["Retry-After"]) == (429, "2")
        assert (first.generates.qsize(), second.generates.qsize()) == (1, 1)


async def test_full_rank_is_replaced_by_another_rank_of_the_same_worker() -> None:
    async def full_on_rank_0(worker: ScriptedWorker, generate: Generate) -> None:
        await (refusing(FailureKind.CAPACITY) if generate.dp_rank == 0 else answering(["ok"]))(worker, generate)

    async with (
        gateway() as running,
        joined(running.url, join_message("a", loads=(DEFAULT_LOAD,) * 2), full_on_rank_0) as worker,
    ):
        assert (await running.client().completions.create(model="smol", prompt="x")).choices[0].text == "ok"
        assert [worker.generates.get_nowait().dp_rank for _ in range(2)] == [0, 1]
        assert await running.metric("pdserve:request_retries_total") == 1


async def test_worker_that_shuts_down_is_replaced_by_another() -> None:
    async with (
        gateway() as running,
        joined(running.url, join_message("a"), refusing(FailureKind.SHUTTING_DOWN)),
        joined(running.url, join_message("b"), answering(["ok"])),
    ):
        assert (await running.client().completions.create(model="smol", prompt="x")).choices[0].text == "ok"


async def test_worker_that_gives_up_mid_stream_ends_it_with_an_error_event() -> None:
    async def giving_up(worker: ScriptedWorker, generate: Generate) -> None:
        await starting(["half"])(worker, generate)
        worker.fail(generate, FailureKind.INTERNAL, "the engine broke")

    async with gateway() as running, joined(running.url, join_message("a"), giving_up):
        first, last = [json.loads(event) for event in await streamed(running, BODY)]
        assert first["choices"][0]["text"] == "half"
        assert (last["error"]["code"], last["error"]["message"]) == ("internal_error", "the engine broke")
        assert await running.metric("pdserve:requests_failed_total", code="internal_error") == 1


async def test_body_that_does_not_arrive_is_a_408() -> None:
    async with gateway(body_timeout_s=0.2) as running:
        reader, writer = await asyncio.open_connection(*running.url.removeprefix("http://").split(":"))
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: g\r\nContent-Length: 100\r\n\r\n{")
        assert b" 408 " in await asyncio.wait_for(reader.readline(), 5)
        writer.close()
        await writer.wait_closed()


async def test_body_for_which_others_leave_no_room_is_a_429_and_theirs_goes_on() -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: g\r\nConnection: close\r\nContent-Length: 100\r\n\r\n"
    async with gateway(max_bodies_bytes=150) as running:
        address = running.url.removeprefix("http://").split(":")
        first, first_writer = await asyncio.open_connection(*address)
        first_writer.write(head + b" " * 90)
        second, second_writer = await asyncio.open_connection(*address)
        second_writer.write(head + b" " * 90)
        answer = await asyncio.wait_for(second.readuntil(b"bodies that are being sent come to 150 bytes"), 5)
        assert answer.startswith(b"HTTP/1.1 429 ")
        first_writer.write(b" " * 10)
        assert b" 400 " in await asyncio.wait_for(first.readline(), 5)
        for writer in (first_writer, second_writer):
            writer.close()
            await writer.wait_closed()


async def test_worker_loss_moves_only_its_own_requests() -> None:
    async def going_on(worker: ScriptedWorker, generate: Generate) -> None:
        await (answering([" and b"]) if generate.told else starting(["from b"]))(worker, generate)

    async with (
        gateway() as running,
        joined(running.url, join_message("a"), starting(["from a"])) as first,
        joined(running.url, join_message("b"), going_on) as second,
    ):
        client = running.client()
        moved, kept = [await client.completions.create(model="smol", prompt="x", stream=True) for _ in range(2)]
        assert [(await anext(stream)).choices[0].text for stream in (moved, kept)] == ["from a", "from b"]
        first.die()
        assert [chunk.choices[0].text async for chunk in moved] == [" and b"]
        generate = second.generates.get_nowait()
        second.deltas(Delta(request_id=generate.request_id, token_ids=(1,), text="!", finish_reason=FinishReason.STOP))
        assert [chunk.choices[0].text async for chunk in kept] == ["!"]
        assert await running.metric("pdserve:request_retries_total") == 1


async def test_silent_worker_loses_its_lease_and_its_requests_move() -> None:
    async with (
        gateway() as running,
        joined(running.url, join_message("a", lease_s=0.3), silent) as mute,
        joined(running.url, join_message("b"), answering(["ok"])),
    ):
        mute.beats = False
        assert (await running.client().completions.create(model="smol", prompt="x")).choices[0].text == "ok"
        _, status = await running.get("/workers")
        assert [worker["worker_id"] for worker in status["workers"]] == ["b"]


@pytest.mark.parametrize("stream", [False, True])
async def test_request_over_its_time_is_a_504_and_is_aborted(stream: bool) -> None:
    async with gateway(request_timeout_s=0.2) as running, joined(running.url, join_message("a"), silent) as worker:
        status, answer, _ = await running.post("/v1/completions", {**BODY, "stream": stream})
        assert (status, answer["error"]["code"]) == (504, "timeout")
        abort = await asyncio.wait_for(worker.aborts.get(), 5)
        assert abort.request_id == worker.generates.get_nowait().request_id


async def test_stream_over_its_time_ends_with_an_error_event() -> None:
    async with gateway(request_timeout_s=0.3) as running, joined(running.url, join_message("a"), starting(["x"])):
        *_, last = await streamed(running, BODY)
        assert json.loads(last)["error"]["code"] == "timeout"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("script", [silent, starting(["some"])])
async def test_client_that_leaves_aborts_its_request(stream: bool, script: Script) -> None:
    async with gateway() as running, joined(running.url, join_message("a"), script) as worker:
        client = asyncio.create_task(running.post("/v1/completions", {**BODY, "stream": stream}))
        generate = await asyncio.wait_for(worker.generates.get(), 5)
        client.cancel()
        assert await asyncio.wait_for(worker.aborts.get(), 5) == Abort(
            request_id=generate.request_id, receiver=worker.incarnation
        )
        await running.until_idle()
        assert await running.metric("pdserve:requests_cancelled_total") == 1


NUM_FLOODING = 2_000


async def flooding(worker: ScriptedWorker, generate: Generate) -> None:
    for _ in range(NUM_FLOODING):
        worker.deltas(Delta(request_id=generate.request_id, token_ids=(1,), text="x" * 10_000))
        await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("changed", "who_ends_it"),
    [
        ({"max_buffered_deltas": 8, "write_timeout_s": 60.0}, "client"),
        ({"max_buffered_deltas": 10_000, "write_timeout_s": 0.3}, "gateway"),
    ],
)
async def test_client_that_does_not_read_is_aborted_at_the_bound(changed: dict[str, Any], who_ends_it: str) -> None:
    join = join_message("a", max_model_len=4096)
    async with gateway(**changed) as running, joined(running.url, join, flooding) as worker:
        client = await _connected(running.url, receive_buffer_bytes=4096)
        body = json.dumps({**BODY, "stream": True, "max_tokens": NUM_FLOODING})
        request = f"POST /v1/completions HTTP/1.1\r\nHost: g\r\nContent-Length: {len(body)}\r\n\r\n{body}"
        await asyncio.get_running_loop().sock_sendall(client, request.encode())
        await asyncio.wait_for(worker.aborts.get(), 10)
        await running.until_idle()
        if who_ends_it == "client":
            client.close()
        await until(lambda: running.metric("pdserve:requests_cancelled_total"), lambda count: count == 1)
        client.close()


async def _connected(url: str, *, receive_buffer_bytes: int) -> socket.socket:
    """A socket that soon stops taking data when nobody reads it."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
    client.setblocking(False)
    host, port = url.removeprefix("http://").split(":")
    await asyncio.get_running_loop().sock_connect(client, (host, int(port)))
    return client


async def test_traffic_of_another_incarnation_or_request_is_counted_and_not_applied() -> None:
    async with gateway() as running, joined(running.url, join_message("a"), silent) as worker:
        answer = asyncio.create_task(running.post("/v1/completions", BODY))
        generate = await asyncio.wait_for(worker.generates.get(), 5)
        wrong = Delta(request_id=generate.request_id, token_ids=(1,), text="wrong", finish_reason=FinishReason.STOP)
        worker.deltas(wrong, sender=Incarnation(99))
        worker.heartbeat(*worker.loads, sender=Incarnation(99))
        worker.deltas(Delta(request_id=RequestId("unknown"), token_ids=(1,), text="wrong"))
        worker.deltas(
            Delta(
                request_id=generate.request_id,
                token_ids=(1,),
                text="right",
                finish_reason=FinishReason.LENGTH,
                prefill=PrefillPlace.LOCAL,
            ),
            wrong,
        )
        _, body, _ = await answer
        assert body["choices"][0]["text"] == "right"
        assert await running.metric("pdserve:stale_messages_total", kind="Generated") == 3
        assert await running.metric("pdserve:stale_messages_total", kind="WorkerHeartbeat") == 1
        assert await running.metric("pdserve:prefills_total", place="local") == 1


async def test_another_workers_request_is_not_this_workers_to_answer() -> None:
    async with (
        gateway() as running,
        joined(running.url, join_message("a"), silent) as owner,
        joined(running.url, join_message("b"), silent) as thief,
    ):
        answer = asyncio.create_task(running.post("/v1/completions", BODY))
        generate = await asyncio.wait_for(owner.generates.get(), 5)
        stolen = Delta(request_id=generate.request_id, token_ids=(1,), text="stolen", finish_reason=FinishReason.STOP)
        thief.deltas(stolen)
        await until(lambda: running.metric("pdserve:stale_messages_total", kind="Generated"), lambda count: count == 1)
        await answering(["own"])(owner, generate)
        assert (await answer)[1]["choices"][0]["text"] == "own"


async def test_worker_that_breaks_the_protocol_is_dropped_and_its_request_moves() -> None:
    async with (
        gateway() as running,
        joined(running.url, join_message("a"), silent) as broken,
        joined(running.url, join_message("b"), answering(["ok"])),
    ):
        answer = asyncio.create_task(running.post("/v1/completions", BODY))
        await asyncio.wait_for(broken.generates.get(), 5)
        broken.channel.send(join_message("a"))
        assert (await answer)[1]["choices"][0]["text"] == "ok"
        assert await running.metric("pdserve:protocol_errors_total") == 1


@pytest.mark.parametrize("num_loads", [0, 1, 3])
async def test_worker_whose_heartbeat_has_another_number_of_ranks_is_dropped(num_loads: int) -> None:
    async with (
        gateway() as running,
        joined(running.url, join_message("a", loads=(DEFAULT_LOAD,) * 2), silent) as broken,
        joined(running.url, join_message("b"), answering(["ok"])),
    ):
        answer = asyncio.create_task(running.post("/v1/completions", BODY))
        await asyncio.wait_for(broken.generates.get(), 5)
        broken.heartbeat(*(DEFAULT_LOAD,) * num_loads)
        assert (await answer)[1]["choices"][0]["text"] == "ok"
        await asyncio.wait_for(broken.disconnected.wait(), 5)
        _, status = await running.get("/workers")
        assert [worker["worker_id"] for worker in status["workers"]] == ["b"]
        assert await running.metric("pdserve:protocol_errors_total") == 1


async def test_restarted_worker_takes_over_what_its_predecessor_had_not_answered() -> None:
    async with (
        gateway() as running,
        joined(running.url, join_message("a", incarnation=1), silent) as old,
    ):
        answer = asyncio.create_task(running.post("/v1/completions", BODY))
        await asyncio.wait_for(old.generates.get(), 5)
        async with joined(running.url, join_message("a", incarnation=2), answering(["new"])) as new:
            assert (await answer)[1]["choices"][0]["text"] == "new"
            assert new.generates.get_nowait().receiver == 2


@pytest.mark.parametrize("script", [silent, starting(["some"])])
async def test_gateway_that_stops_ends_pending_requests_with_an_error(script: Script) -> None:
    async with gateway() as running, joined(running.url, join_message("a"), script) as worker:

        async def ask() -> str:
            body = {**BODY, "stream": script is not silent}
            async with running.session.post(running.url + "/v1/completions", json=body) as response:
                return (await response.read()).decode()

        answer = asyncio.create_task(ask())
        await asyncio.wait_for(worker.generates.get(), 5)
        await running.stop()
        assert "shutting_down" in await answer
        assert (await asyncio.wait_for(worker.aborts.get(), 5)).receiver == worker.incarnation
