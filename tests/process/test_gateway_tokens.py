"""`/tokenize` and `/detokenize`: tokens of texts and chats and back, and what is refused."""

from typing import Any

import pytest
from tests.process.gateway_under_test import gateway
from tests.process.scripted_worker import join_message, joined

from pdserve.gateway.token_requests import MAX_DETOKENIZED

MESSAGES = [{"role": "user", "content": "Hi"}]


async def test_tokenize_text_has_tokens_their_count_and_the_context() -> None:
    async with gateway() as running, joined(running.url, join_message("d0", max_model_len=99)):
        status, answer, _ = await running.post("/tokenize", {"model": "smol", "prompt": "ab"})
        assert (status, answer) == (200, {"count": 2, "max_model_len": 99, "tokens": [97, 98]})


async def test_tokenize_without_workers_and_model_still_answers() -> None:
    async with gateway() as running:
        status, answer, _ = await running.post("/tokenize", {"prompt": ""})
        assert (status, answer) == (200, {"count": 0, "max_model_len": None, "tokens": []})


@pytest.mark.parametrize(("fields", "expected"), [({}, b"<user>Hi"), ({"add_generation_prompt": False}, b"<user>Hi.")])
async def test_tokenize_chat_is_what_the_template_makes_of_it(fields: dict[str, Any], expected: bytes) -> None:
    async with gateway() as running:
        _, answer, _ = await running.post("/tokenize", {"model": "default", "messages": MESSAGES, **fields})
        assert bytes(answer["tokens"]) == expected


async def test_tokenize_chat_counts_the_tools_of_its_prompt() -> None:
    tools = [{"type": "function", "function": {"name": "now"}}]
    async with gateway() as running:
        _, answer, _ = await running.post("/tokenize", {"messages": MESSAGES, "tools": tools})
        assert b'{"name": "now"}' in bytes(answer["tokens"])
        unfinished = {"messages": MESSAGES, "continue_final_message": True}
        _, answer, _ = await running.post("/tokenize", unfinished)
        assert bytes(answer["tokens"]) == b"<user>Hi"


async def test_detokenize_gives_back_the_tokenized_text() -> None:
    async with gateway() as running:
        _, tokenized, _ = await running.post("/tokenize", {"prompt": "héllo"})
        status, answer, _ = await running.post("/detokenize", {"model": "smol", "tokens": tokenized["tokens"]})
        assert (status, answer) == (200, {"prompt": "héllo"})


@pytest.mark.parametrize(
    ("path", "body", "param", "code"),
    [
        ("/tokenize", {}, "prompt", "invalid_value"),
        ("/tokenize", {"prompt": 5}, "prompt", "invalid_value"),
        ("/tokenize", {"prompt": "x", "messages": MESSAGES}, "messages", "invalid_value"),
        ("/tokenize", {"prompt": "x", "add_generation_prompt": True}, "add_generation_prompt", "invalid_value"),
        ("/tokenize", {"prompt": "x", "add_special_token": True}, "add_special_token", "invalid_value"),
        ("/tokenize", {"prompt": "x", "return_token_strs": True}, "return_token_strs", "unsupported_parameter"),
        (
            "/tokenize",
            {"messages": MESSAGES, "add_special_tokens": True},
            "add_special_tokens",
            "unsupported_parameter",
        ),
        ("/tokenize", {"messages": MESSAGES, "chat_template": "x"}, "chat_template", "unsupported_parameter"),
        ("/tokenize", {"messages": MESSAGES, "tools": [{"type": "x"}]}, "tools[0].type", "invalid_value"),
        (
            "/tokenize",
            {"messages": MESSAGES, "chat_template_kwargs": {"mood": 1}},
            "chat_template_kwargs.mood",
            "invalid_value",
        ),
        ("/tokenize", {"messages": []}, "messages", "invalid_value"),
        ("/tokenize", {"messages": [{"role": "king", "content": "x"}]}, "messages[0].role", "invalid_value"),
        ("/tokenize", {"messages": [{"role": "assistant", "content": "x"}]}, "messages", "invalid_value"),
        ("/tokenize", {"messages": [{"role": "user", "content": "no template"}]}, "messages", "unsupported_parameter"),
        ("/detokenize", {}, "tokens", "invalid_value"),
        ("/detokenize", {"tokens": ["x"]}, "tokens[0]", "invalid_value"),
        ("/detokenize", {"tokens": [256]}, "tokens", "invalid_value"),
        ("/detokenize", {"tokens": [-1]}, "tokens", "invalid_value"),
        ("/detokenize", {"tokens": [2**70]}, "tokens", "invalid_value"),
        ("/detokenize", {"tokens": [1], "skip": 1}, "skip", "invalid_value"),
    ],
)
async def test_token_body_is_refused_by_field(path: str, body: dict[str, Any], param: str, code: str) -> None:
    async with gateway() as running:
        status, answer, _ = await running.post(path, body)
        assert (status, answer["error"]["param"], answer["error"]["code"]) == (400, param, code)


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"prompt": "\\ud800"}', b'{"tokens": [1.5]}'])
async def test_token_body_that_is_no_request_is_a_400(path: str, body: bytes) -> None:
    async with gateway() as running:
        status, answer, _ = await running.post(path, body)
        assert status == 400
        assert answer["error"].keys() == {"message", "type", "param", "code"}


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
async def test_token_endpoints_know_one_model_and_one_key(path: str) -> None:
    body = {"model": "gpt-4", "prompt": "x"} if path == "/tokenize" else {"model": "gpt-4", "tokens": [1]}
    async with gateway() as running:
        assert (await running.post(path, body))[0] == 404
    async with gateway(api_key="right") as running:
        status, answer, _ = await running.post(path, body)
        assert (status, answer["error"]["code"]) == (401, "invalid_api_key")


async def test_detokenize_more_than_its_bound_is_refused() -> None:
    async with gateway(max_body_bytes=1 << 20) as running:
        status, answer, _ = await running.post("/detokenize", {"tokens": [1] * (MAX_DETOKENIZED + 1)})
        assert (status, answer["error"]["param"]) == (400, "tokens")


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
async def test_token_body_over_the_limit_is_a_413(path: str) -> None:
    async with gateway() as running:
        assert (await running.post(path, b"x" * 70_000))[0] == 413
