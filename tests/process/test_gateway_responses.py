"""`/v1/responses` as OpenAI's own client sees it, over scripted workers."""

import asyncio
import json
import socket
from typing import Any

import openai
import pytest
from openai.types.responses import ResponseCreatedEvent
from tests.process.gateway_under_test import gateway
from tests.process.responses_client import (
    EVENTS_AFTER_TEXT,
    EVENTS_BEFORE_TEXT,
    LOGPROBS,
    SCHEMA_FORMAT,
    create,
    events_of,
    final_response,
)
from tests.process.scripted_worker import (
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

from pdserve.config.role import Role
from pdserve.wire.cluster import Abort, Delta, FailureKind, FinishReason, Generate


def breaking_after(text: str) -> Script:
    async def script(worker: ScriptedWorker, generate: Generate) -> None:
        await starting([text])(worker, generate)
        worker.fail(generate, FailureKind.INTERNAL, "the engine broke")

    return script


async def test_response_whole_has_text_usage_and_what_was_asked() -> None:
    async with (
        gateway() as running,
        joined(running.url, join_message("d0"), answering(["Hello", ", ", "you"])) as worker,
    ):
        response = await create(running, instructions="Be kind", metadata={"trace": "7"}, temperature=0.5, user="me")
        assert response.output_text == "Hello, you"
        assert (response.status, response.incomplete_details, response.error) == ("completed", None, None)
        assert response.id.startswith("resp_") and response.object == "response" and response.model == "smol"
        assert (response.instructions, response.metadata, response.user) == ("Be kind", {"trace": "7"}, "me")
        assert (response.temperature, response.top_p, response.max_output_tokens) == (0.5, 1.0, None)
        assert response.to_dict()["store"] is False
        (item,) = response.output
        assert item.type == "message" and item.status == "completed" and item.role == "assistant"
        assert item.id.startswith("msg_")
        assert response.usage is not None
        assert (response.usage.input_tokens, response.usage.output_tokens, response.usage.total_tokens) == (23, 3, 26)
        assert response.usage.input_tokens_details.cached_tokens == 0
        assert response.usage.output_tokens_details.reasoning_tokens == 0
        generate = worker.generates.get_nowait()
        assert bytes(generate.prompt_token_ids) == b"<system>Be kind<user>Hi"
        assert generate.request_id == response.id
        assert (generate.sampling.temperature, generate.sampling.max_tokens) == (0.5, 256 - 23)


async def test_response_over_its_token_limit_is_incomplete_and_says_why() -> None:
    script = answering(["a", "b"], finish_reason=FinishReason.LENGTH)
    async with gateway() as running, joined(running.url, join_message("d0"), script) as worker:
        response = await create(running, max_output_tokens=2, top_p=0.9)
        assert (response.status, response.output_text) == ("incomplete", "ab")
        assert response.incomplete_details is not None
        assert response.incomplete_details.reason == "max_output_tokens"
        assert response.output[0].to_dict()["status"] == "incomplete"
        sampling = worker.generates.get_nowait().sampling
        assert (sampling.max_tokens, sampling.top_p) == (2, 0.9)
        *_, last = await events_of(running, max_output_tokens=2)
        assert last.type == "response.incomplete"
        assert final_response(last).usage == response.usage


async def test_response_stream_has_every_event_in_order() -> None:
    async with gateway() as running, joined(running.url, join_message("d0"), answering(["a", "", "b"])):
        events = await events_of(running, model="default", metadata={"k": "v"})
        deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
        assert deltas == ["a", "b"]
        assert [event.type for event in events] == [
            *EVENTS_BEFORE_TEXT,
            *["response.output_text.delta"] * 2,
            *EVENTS_AFTER_TEXT,
            "response.completed",
        ]
        assert [event.to_dict()["sequence_number"] for event in events] == list(range(10))
        response = final_response(events[-1])
        assert (response.status, response.output_text, response.metadata) == ("completed", "ab", {"k": "v"})
        assert response.usage is not None and response.usage.output_tokens == 3
        item_ids = {event.to_dict().get("item_id", response.output[0].id) for event in events}
        assert item_ids == {response.output[0].id}
        assert isinstance(events[0], ResponseCreatedEvent) and events[0].response.status == "in_progress"


async def test_response_stream_helper_of_the_client_assembles_the_text() -> None:
    async with (
        gateway() as running,
        joined(running.url, join_message("d0"), answering(["Hello", " you"])),
        running.client().responses.stream(model="smol", input="Hi") as stream,
    ):
        assert (await stream.get_final_response()).output_text == "Hello you"


async def test_response_events_are_named_as_their_types() -> None:
    async with gateway() as running, joined(running.url, join_message("d0")):
        body = {"model": "smol", "input": "Hi", "stream": True}
        async with running.session.post(running.url + "/v1/responses", json=body) as response:
            assert response.headers["Content-Type"].startswith("text/event-stream")
            text = (await response.read()).decode()
    for event in text.removesuffix("\n\n").split("\n\n"):
        name, data = event.split("\n")
        assert f'"type":"{name.removeprefix("event: ")}"' in data


async def test_response_input_items_are_the_conversation() -> None:
    async with gateway() as running, joined(running.url, join_message("d0"), answering(["Hello"])) as worker:
        earlier = await create(running)
        worker.generates.get_nowait()
        items: list[Any] = [
            {"role": "developer", "content": "rules"},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "H"}]},
            *earlier.output,
            {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        ]
        await create(running, input=items)
        prompt = bytes(worker.generates.get_nowait().prompt_token_ids)
        assert prompt == b"<system>rules<user>H<assistant>Hello<user>ab"


async def test_response_fields_that_ask_for_nothing_are_taken() -> None:
    async with gateway() as running, joined(running.url, join_message("d0")):
        response = await create(
            running,
            store=False,
            background=False,
            previous_response_id=None,
            tools=[],
            tool_choice="auto",
            parallel_tool_calls=True,
            include=[],
            truncation="disabled",
            text={"format": {"type": "text"}, "verbosity": "medium"},
            service_tier="auto",
            reasoning=None,
        )
        assert response.status == "completed"


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"store": True}, "store", "unsupported_parameter"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "unsupported_parameter"),
        ({"conversation": "conv_1"}, "conversation", "unsupported_parameter"),
        ({"background": True}, "background", "unsupported_parameter"),
        ({"tools": [{"type": "web_search"}]}, "tools", "unsupported_parameter"),
        ({"tool_choice": "required"}, "tool_choice", "unsupported_parameter"),
        ({"reasoning": {"effort": "low"}}, "reasoning", "unsupported_parameter"),
        ({"include": ["reasoning.encrypted_content"]}, "include", "unsupported_parameter"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type", "invalid_value"),
        ({"text": {"format": {**SCHEMA_FORMAT, "name": "no name"}}}, "text.format.name", "invalid_value"),
        ({"text": {"format": {**SCHEMA_FORMAT, "schema": {"type": "x"}}}}, "text.format.schema.type", "invalid_value"),
        ({"text": {"verbosity": "low"}}, "text.verbosity", "unsupported_parameter"),
        ({"truncation": "auto"}, "truncation", "unsupported_parameter"),
        ({"top_logprobs": 2}, "top_logprobs", "invalid_value"),
        ({"top_logprobs": 21, "include": LOGPROBS}, "top_logprobs", "invalid_value"),
        ({"prompt": {"id": "p"}}, "prompt", "unsupported_parameter"),
        ({"stream_options": {"include_obfuscation": True}}, "stream_options", "unsupported_parameter"),
        ({"input": ""}, "input", "invalid_value"),
        ({"input": []}, "input", "invalid_value"),
        ({"input": [{"role": "king", "content": "x"}]}, "input[0].role", "invalid_value"),
        ({"input": [{"role": "user"}]}, "input[0].content", "invalid_value"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type", "unsupported_parameter"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0].type",
            "unsupported_parameter",
        ),
        ({"input": [{"role": "assistant", "content": "I first"}]}, "input", "invalid_value"),
        ({"input": "no template"}, "input", "unsupported_parameter"),
        ({"input": "x" * 300}, "input", "context_length_exceeded"),
        ({"max_output_tokens": 249}, "max_output_tokens", "context_length_exceeded"),
        ({"max_output_tokens": 0}, "max_output_tokens", "invalid_value"),
        ({"temperature": 3}, "temperature", "invalid_value"),
        ({"top_p": 0}, "top_p", "invalid_value"),
        ({"metadata": {"k": "v" * 513}}, "metadata[...]", "invalid_value"),
        ({"metadata": {str(index): "v" for index in range(17)}}, "metadata", "invalid_value"),
        ({"extra_body": {"max_tokens": 5}}, "max_tokens", "invalid_value"),
    ],
)
async def test_response_bad_request_is_refused_by_field_before_dispatch(
    fields: dict[str, Any], param: str, code: str
) -> None:
    async with gateway() as running, joined(running.url, join_message("d0")) as worker:
        with pytest.raises(openai.BadRequestError) as raised:
            await create(running, **fields)
        assert (raised.value.param, raised.value.code) == (param, code)
        assert raised.value.type == "invalid_request_error"
        assert worker.generates.empty()


async def test_response_of_an_unknown_model_without_key_or_worker_has_its_status() -> None:
    async with gateway() as running, joined(running.url, join_message("p0", role=Role.PREFILL)):
        with pytest.raises(openai.NotFoundError):
            await create(running, model="gpt-4")
        with pytest.raises(openai.InternalServerError, match="no decode worker"):
            await create(running)
    async with gateway(api_key="right") as running:
        with pytest.raises(openai.AuthenticationError):
            await create(running)


@pytest.mark.parametrize(
    ("kind", "status", "code"),
    [
        (FailureKind.CAPACITY, 429, "over_capacity"),
        (FailureKind.TIMEOUT, 504, "timeout"),
        (FailureKind.INTERNAL, 500, "internal_error"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_response_that_fails_before_the_first_token_has_its_status(
    kind: FailureKind, status: int, code: str, stream: bool
) -> None:
    async with gateway() as running, joined(running.url, join_message("d0"), refusing(kind)):
        given, answer, _ = await running.post("/v1/responses", {"model": "smol", "input": "x", "stream": stream})
        assert (given, answer["error"]["code"], answer["error"]["message"]) == (status, code, "scripted")
        assert await running.metric("pdserve:requests_failed_total", code=code) == 1


async def test_response_stream_that_breaks_ends_with_failed_and_the_text_so_far() -> None:
    async with gateway() as running, joined(running.url, join_message("d0"), breaking_after("half")):
        events = await events_of(running)
        assert [event.type for event in events] == [
            *EVENTS_BEFORE_TEXT,
            "response.output_text.delta",
            "response.failed",
        ]
        response = final_response(events[-1])
        assert (response.status, response.output_text) == ("failed", "half")
        assert response.error is not None
        assert (response.error.code, response.error.message) == ("server_error", "the engine broke")
        assert await running.metric("pdserve:requests_failed_total", code="internal_error") == 1


async def test_response_stream_over_its_time_ends_with_failed() -> None:
    async with gateway(request_timeout_s=0.3) as running, joined(running.url, join_message("d0"), starting(["x"])):
        *_, last = await events_of(running)
        error = final_response(last).error
        assert error is not None and error.message == "the request took too long"


async def test_response_whose_worker_is_lost_goes_on_from_another() -> None:
    async def lost_midway(worker: ScriptedWorker, generate: Generate) -> None:
        await starting(["half", " an"])(worker, generate)
        await asyncio.sleep(0.05)
        await dying(worker, generate)

    async with (
        gateway() as running,
        joined(running.url, join_message("a"), lost_midway),
        joined(running.url, join_message("b"), answering([" answer"])),
    ):
        response = await create(running)
        assert response.output_text == "half an answer"
        assert response.usage is not None and response.usage.output_tokens == 3


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("script", [silent, starting(["some"])])
async def test_response_whose_client_leaves_is_aborted(stream: bool, script: Script) -> None:
    async with gateway() as running, joined(running.url, join_message("d0"), script) as worker:
        body = {"model": "smol", "input": "x", "stream": stream}
        client = asyncio.create_task(running.post("/v1/responses", body))
        generate = await asyncio.wait_for(worker.generates.get(), 5)
        client.cancel()
        assert await asyncio.wait_for(worker.aborts.get(), 5) == Abort(
            request_id=generate.request_id, receiver=worker.incarnation
        )
        await running.until_idle()
        assert await running.metric("pdserve:requests_cancelled_total") == 1


async def test_response_whose_client_does_not_read_is_aborted() -> None:
    async def flooding(worker: ScriptedWorker, generate: Generate) -> None:
        for _ in range(2_000):
            worker.deltas(Delta(request_id=generate.request_id, token_ids=(1,), text="x" * 10_000))
            await asyncio.sleep(0)

    bounds: dict[str, Any] = {"max_buffered_deltas": 10_000, "write_timeout_s": 0.3}
    join = join_message("d0", max_model_len=4096)
    async with gateway(**bounds) as running, joined(running.url, join, flooding) as worker:
        body = json.dumps({"model": "smol", "input": "x", "stream": True})
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.setblocking(False)
            host, port = running.url.removeprefix("http://").split(":")
            loop = asyncio.get_running_loop()
            await loop.sock_connect(client, (host, int(port)))
            head = f"POST /v1/responses HTTP/1.1\r\nHost: g\r\nContent-Length: {len(body)}\r\n\r\n"
            await loop.sock_sendall(client, (head + body).encode())
            await asyncio.wait_for(worker.aborts.get(), 10)
            await running.until_idle()
            assert await running.metric("pdserve:requests_cancelled_total") == 1
