"""The gateway as OpenAI's own client sees it."""

import asyncio
from typing import Any

import openai
import pytest
from tests.process.gateway_under_test import gateway, until
from tests.process.scripted_worker import ScriptedWorker, answering, join_message, joined, refusing, shake_hands

from pdserve.config.role import Role
from pdserve.sampling import TokenLogprobs
from pdserve.wire.cluster import Delta, FailureKind, FinishReason, Generate, JoinRefused, TokenEntry

CHAT: Any = [{"role": "user", "content": "Hi"}]


async def test_chat_whole_answer_has_text_usage_and_ids() -> None:
    async with (
        gateway() as running,
        joined(running.url, join_message("d0"), answering(["Hello", ", ", "you"])) as worker,
    ):
        answer = await running.client().chat.completions.create(model="smol", messages=CHAT, temperature=0)
        assert answer.choices[0].message.content == "Hello, you"
        assert answer.choices[0].message.role == "assistant"
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage is not None
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (8, 3, 11)
        assert answer.object == "chat.completion"
        assert answer.id.startswith("chatcmpl-")
        assert answer.model == "smol"
        assert answer.system_fingerprint == "pdserve-f1"
        generate = worker.generates.get_nowait()
        assert bytes(generate.prompt_token_ids) == b"<user>Hi"
        assert generate.receiver == worker.incarnation
        assert generate.request_id == answer.id
        assert generate.sampling.temperature == 0 and generate.sampling.seed is None
        assert generate.sampling.max_tokens == 256 - 8
        assert 0 < generate.timeout_s <= 20


async def test_chat_stream_has_role_texts_finish_and_done() -> None:
    script = answering(["a", "", "b", "c"], finish_reason=FinishReason.LENGTH)
    async with gateway() as running, joined(running.url, join_message("d0"), script):
        stream = await running.client().chat.completions.create(model="default", messages=CHAT, stream=True)
        chunks = [chunk async for chunk in stream]
        assert [chunk.choices[0].delta.content for chunk in chunks] == ["a", "b", "c"]
        assert [chunk.choices[0].delta.role for chunk in chunks] == ["assistant", None, None]
        assert [chunk.choices[0].finish_reason for chunk in chunks] == [None, None, "length"]
        assert len({chunk.id for chunk in chunks}) == 1
        assert all(chunk.usage is None and chunk.object == "chat.completion.chunk" for chunk in chunks)


async def test_chat_stream_with_usage_ends_with_it() -> None:
    async with gateway() as running, joined(running.url, join_message("d0"), answering(["a", "", "b"])):
        stream = await running.client().chat.completions.create(
            model="smol", messages=CHAT, stream=True, stream_options={"include_usage": True}
        )
        *others, last = [chunk async for chunk in stream]
        assert [chunk.to_dict(exclude_unset=True)["usage"] for chunk in others] == [None, None]
        assert last.choices == []
        assert last.usage is not None and last.usage.completion_tokens == 3


async def test_completion_whole_and_streamed_are_the_same_text() -> None:
    async with gateway() as running, joined(running.url, join_message("d0"), answering(["once", " upon"])) as worker:
        client = running.client()
        whole = await client.completions.create(model="smol", prompt="Tell")
        assert whole.choices[0].text == "once upon"
        assert whole.object == "text_completion" and whole.id.startswith("cmpl-")
        stream = await client.completions.create(model="smol", prompt=[84, 101], stream=True)
        assert "".join([chunk.choices[0].text async for chunk in stream]) == "once upon"
        first, second = worker.generates.get_nowait(), worker.generates.get_nowait()
        assert bytes(first.prompt_token_ids) == b"Tell" and first.sampling.max_tokens == 16
        assert second.prompt_token_ids == (84, 101)


async def test_chat_sampling_fields_reach_the_worker() -> None:
    async with gateway() as running, joined(running.url, join_message("d0")) as worker:
        await running.client().chat.completions.create(
            model="smol",
            messages=[{"role": "system", "content": [{"type": "text", "text": "x"}]}, *CHAT],
            max_tokens=3,
            max_completion_tokens=5,
            temperature=0.5,
            top_p=0.9,
            seed=-7,
            stop=["a", "b"],
            presence_penalty=1.5,
            frequency_penalty=-1,
            user="me",
            n=1,
            logprobs=False,
            tools=[],
            logit_bias={"5": -100, "0": 1},
            extra_body={
                "top_k": -1,
                "min_p": 0.1,
                "repetition_penalty": 1.1,
                "ignore_eos": True,
                "stop_token_ids": [3],
                "min_tokens": 2,
            },
        )
        sampling = worker.generates.get_nowait().sampling
        assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (5, 0.5, 0.9, 0)
        assert (sampling.seed, sampling.stop, sampling.stop_token_ids) == (-7, ("a", "b"), (3,))
        assert (sampling.presence_penalty, sampling.frequency_penalty) == (1.5, -1)
        assert (sampling.repetition_penalty, sampling.ignore_eos) == (1.1, True)
        assert (sampling.min_p, sampling.min_tokens, sampling.logit_bias) == (0.1, 2, ((5, -100.0), (0, 1.0)))


async def test_chat_without_seed_draws_another_each_time() -> None:
    async with gateway() as running, joined(running.url, join_message("d0")) as worker:
        for _ in range(2):
            await running.client().chat.completions.create(model="smol", messages=CHAT)
        seeds = {worker.generates.get_nowait().sampling.seed for _ in range(2)}
        assert len(seeds) == 2 and None not in seeds


async def test_completion_with_token_ids_asked_for_carries_each_token() -> None:
    async with gateway() as running, joined(running.url, join_message("d0"), answering(["a", "", "b"])):
        client = running.client()
        asked = {"return_token_ids": True}
        whole = await client.completions.create(model="smol", prompt="x", extra_body=asked)
        assert whole.choices[0].to_dict()["token_ids"] == [0, 1, 2]
        stream = await client.completions.create(model="smol", prompt="x", stream=True, extra_body=asked)
        assert [chunk.choices[0].to_dict()["token_ids"] async for chunk in stream] == [[0], [1], [2]]


async def report_parrot(worker: ScriptedWorker, generate: Generate) -> None:
    """Text "a\U0001f99c": its second character comes as four tokens of a byte each, the first as the likelier one."""
    token_ids = tuple("a\U0001f99c".encode())
    entries = [
        TokenEntry(
            text_offset=min(index, 1),
            logprobs=TokenLogprobs(token_id=token_id, logprob=-1.5, top=((98, -0.5), (token_id, -1.5))),
        )
        for index, token_id in enumerate(token_ids)
    ]
    worker.deltas(
        Delta(request_id=generate.request_id, token_ids=token_ids[:2], text="a", entries=tuple(entries[:1])),
        Delta(request_id=generate.request_id, token_ids=token_ids[2:4], text=""),
        Delta(
            request_id=generate.request_id,
            token_ids=token_ids[4:],
            text="\U0001f99c",
            entries=tuple(entries[1:]),
            finish_reason=FinishReason.LENGTH,
        ),
    )


async def test_chat_logprobs_whole_and_streamed_have_an_entry_for_each_token() -> None:
    async with gateway() as running, joined(running.url, join_message("d0"), report_parrot) as worker:
        chats = running.client().chat.completions
        whole = await chats.create(model="smol", messages=CHAT, logprobs=True, top_logprobs=2)
        assert worker.generates.get_nowait().sampling.num_top_logprobs == 2
        assert whole.choices[0].logprobs is not None
        content = whole.choices[0].logprobs.content
        assert content is not None
        assert [entry.token for entry in content] == ["a", "bytes:\\xf0", "bytes:\\x9f", "bytes:\\xa6", "bytes:\\x9c"]
        assert b"".join(bytes(entry.bytes or ()) for entry in content).decode() == whole.choices[0].message.content
        assert {entry.logprob for entry in content} == {-1.5}
        assert [(top.token, top.logprob, top.bytes) for top in content[0].top_logprobs] == [
            ("b", -0.5, [98]),
            ("a", -1.5, [97]),
        ]
        stream = await chats.create(model="smol", messages=CHAT, logprobs=True, top_logprobs=2, stream=True)
        reported = [chunk.choices[0].logprobs async for chunk in stream]
        assert [entry for logprobs in reported if logprobs for entry in logprobs.content or ()] == content


async def test_completion_logprobs_whole_and_streamed_are_in_the_legacy_form() -> None:
    async with gateway() as running, joined(running.url, join_message("d0"), report_parrot):
        completions = running.client().completions
        whole = (await completions.create(model="smol", prompt="x", logprobs=2)).choices[0].logprobs
        assert whole is not None and whole.tokens is not None
        assert whole.tokens[:2] == ["a", "bytes:\\xf0"]
        assert whole.text_offset == [0, 1, 1, 1, 1]
        assert whole.token_logprobs == [-1.5] * 5
        assert whole.top_logprobs is not None and whole.top_logprobs[0] == {"b": -0.5, "a": -1.5}
        stream = await completions.create(model="smol", prompt="x", logprobs=2, stream=True)
        reported = [chunk.choices[0].logprobs async for chunk in stream]
        assert [token for logprobs in reported if logprobs for token in logprobs.tokens or ()] == whole.tokens


async def test_models_are_the_own_name_and_default() -> None:
    async with gateway() as running, joined(running.url, join_message("d0")):
        assert [model.id async for model in running.client().models.list()] == ["smol", "default"]


async def test_many_clients_at_once_each_get_their_own_answer() -> None:
    async def echo_length(worker: Any, generate: Any) -> None:
        await answering([f"{len(generate.prompt_token_ids)}", "!"])(worker, generate)

    async with gateway() as running, joined(running.url, join_message("d0"), echo_length):
        client = running.client()

        async def ask(length: int) -> None:
            stream = await client.completions.create(model="smol", prompt="x" * length, stream=True)
            assert "".join([chunk.choices[0].text async for chunk in stream]) == f"{length}!"

        await asyncio.gather(*(ask(length) for length in range(1, 41)))


@pytest.mark.parametrize(
    ("arguments", "param", "code"),
    [
        ({"n": 129}, "n", "invalid_value"),
        ({"top_logprobs": 3}, "top_logprobs", "invalid_value"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_value"),
        ({"logit_bias": {"256": 1}}, "logit_bias", "invalid_value"),
        ({"logit_bias": {"5": 101}}, "logit_bias", "invalid_value"),
        ({"extra_body": {"min_p": 1.5}}, "min_p", "invalid_value"),
        ({"extra_body": {"min_tokens": 4}, "max_tokens": 3}, "min_tokens", "invalid_value"),
        ({"functions": [{"name": "f"}]}, "functions", "unsupported_parameter"),
        ({"function_call": {"name": "f"}}, "function_call", "unsupported_parameter"),
        ({"modalities": ["audio"]}, "modalities", "unsupported_parameter"),
        ({"temperature": 3}, "temperature", "invalid_value"),
        ({"top_p": 0}, "top_p", "invalid_value"),
        ({"max_tokens": 0}, "max_tokens", "invalid_value"),
        ({"stop": list("abcde")}, "stop", "invalid_value"),
        ({"presence_penalty": -2.5}, "presence_penalty", "invalid_value"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
        ({"messages": []}, "messages", "invalid_value"),
        ({"messages": [{"role": "assistant", "content": "I first"}]}, "messages", "invalid_value"),
        ({"messages": [{"role": "user", "content": "no template"}]}, "messages", "unsupported_parameter"),
        ({"messages": [{"role": "function", "content": "x"}]}, "messages[0].role", "invalid_value"),
        ({"extra_body": {"temprature": 1}}, "temprature", "invalid_value"),
        ({"extra_body": {"stop_token_ids": [256]}}, "stop_token_ids", "invalid_value"),
        ({"messages": [{"role": "user", "content": "x" * 300}]}, "messages", "context_length_exceeded"),
        ({"max_tokens": 249}, "max_tokens", "context_length_exceeded"),
    ],
)
async def test_chat_bad_request_is_refused_by_field_before_dispatch(
    arguments: dict[str, Any], param: str, code: str
) -> None:
    async with gateway() as running, joined(running.url, join_message("d0")) as worker:
        fields: dict[str, Any] = {"model": "smol", "messages": CHAT, **arguments}
        with pytest.raises(openai.BadRequestError) as raised:
            await running.client().chat.completions.create(**fields)
        assert (raised.value.param, raised.value.code) == (param, code)
        assert raised.value.type == "invalid_request_error"
        assert worker.generates.empty()


@pytest.mark.parametrize(
    ("arguments", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [1, 999]}, "prompt"),
        ({"suffix": "x"}, "suffix"),
        ({"logprobs": 6}, "logprobs"),
        ({"extra_body": {"messages": CHAT}}, "messages"),
    ],
)
async def test_completion_bad_request_is_refused_by_field(arguments: dict[str, Any], param: str) -> None:
    async with gateway() as running, joined(running.url, join_message("d0")) as worker:
        fields: dict[str, Any] = {"model": "smol", "prompt": "x", **arguments}
        with pytest.raises(openai.BadRequestError) as raised:
            await running.client().completions.create(**fields)
        assert raised.value.param == param
        assert worker.generates.empty()


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b'"x"', b"\xff\xfe", b"[" * 60_000, b'{"model": "smol"}'])
async def test_body_that_is_no_request_is_a_400_in_openai_form(body: bytes) -> None:
    async with gateway() as running, joined(running.url, join_message("d0")):
        status, answer, _ = await running.post("/v1/chat/completions", body)
        assert status == 400
        assert answer["error"].keys() == {"message", "type", "param", "code"}


async def test_body_over_the_limit_is_a_413() -> None:
    async with gateway() as running, joined(running.url, join_message("d0")):
        status, answer, _ = await running.post("/v1/completions", b"x" * 70_000)
        assert (status, answer["error"]["code"]) == (413, "request_too_large")


@pytest.mark.parametrize(("path", "status"), [("/v1/nothing", 404), ("/v1/models", 405)])
async def test_unknown_path_and_method_are_answered_in_openai_form(path: str, status: int) -> None:
    async with gateway() as running:
        given, answer, _ = await running.post(path, b"{}")
        assert given == status
        assert answer["error"]["message"]


async def test_unknown_model_is_a_404_that_names_the_known_one() -> None:
    async with gateway() as running, joined(running.url, join_message("d0")):
        with pytest.raises(openai.NotFoundError, match="smol") as raised:
            await running.client().chat.completions.create(model="gpt-4", messages=CHAT)
        assert raised.value.code == "model_not_found"


async def test_wrong_api_key_is_a_401_and_the_right_one_is_not() -> None:
    async with gateway(api_key="right") as running, joined(running.url, join_message("d0")):
        with pytest.raises(openai.AuthenticationError):
            await running.client("wrong").models.list()
        assert await running.metric("pdserve:authentications_refused_total", credential="api_key") == 1
        assert (await running.client("right").completions.create(model="smol", prompt="x")).choices
        assert (await running.get("/live"))[0] == 200


async def test_no_worker_is_a_503_with_retry_after() -> None:
    async with gateway() as running, joined(running.url, join_message("p0", role=Role.PREFILL)):
        with pytest.raises(openai.InternalServerError, match="no decode worker") as raised:
            await running.client().completions.create(model="smol", prompt="x")
        assert raised.value.status_code == 503
        assert raised.value.response.headers["Retry-After"] == "1"


async def test_no_worker_because_all_were_refused_is_said_so() -> None:
    async with gateway() as running:
        channel, answer = await shake_hands(running.session, running.url, join_message("d0", model_name="another"))
        assert isinstance(answer, JoinRefused)
        await channel.close()
        _, body, _ = await running.post("/v1/completions", {"model": "smol", "prompt": "x"})
        assert "no decode worker has joined: 1 tried and were refused" in body["error"]["message"]
        async with joined(running.url, join_message("d0")):
            assert (await running.get("/ready"))[0] == 200
        await until(lambda: running.get("/ready"), lambda answer: answer[0] == 503)
        assert (await running.get("/ready"))[1]["status"].startswith("no decode worker has joined; start one")


@pytest.mark.parametrize(
    ("kind", "status", "code"),
    [
        (FailureKind.CAPACITY, 429, "over_capacity"),
        (FailureKind.TIMEOUT, 504, "timeout"),
        (FailureKind.INVALID, 400, "invalid_value"),
        (FailureKind.INTERNAL, 500, "internal_error"),
        (FailureKind.SHUTTING_DOWN, 503, "shutting_down"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_worker_failure_before_the_first_token_has_its_status(
    kind: FailureKind, status: int, code: str, stream: bool
) -> None:
    async with gateway() as running, joined(running.url, join_message("d0"), refusing(kind, retry_after_s=6.2)):
        given, answer, headers = await running.post(
            "/v1/completions", {"model": "smol", "prompt": "x", "stream": stream}
        )
        assert (given, answer["error"]["code"], answer["error"]["message"]) == (status, code, "scripted")
        assert headers.get("Retry-After") == ("7" if status in (429, 503) else None)


async def test_pending_over_the_bound_is_a_429() -> None:
    async with gateway(max_pending=0) as running, joined(running.url, join_message("d0")):
        with pytest.raises(openai.RateLimitError) as raised:
            await running.client().completions.create(model="smol", prompt="x")
        assert raised.value.response.headers["Retry-After"] == "1"
