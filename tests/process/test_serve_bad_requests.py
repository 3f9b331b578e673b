"""What clients send wrongly, refused in OpenAI's form before a page is taken."""

from io import BytesIO
from typing import Any

import openai
import pytest
from tests.process.deployment_under_test import KV_TOKENS, Running

from pdserve.units import MIB

pytestmark = pytest.mark.asyncio(loop_scope="session")

CONTEXT = KV_TOKENS
"""Less than the model's: what the smallest decode worker's KV cache holds."""


async def refused(running: Running, path: str, body: bytes) -> tuple[int, dict[str, Any]]:
    """Status and error; the body goes as it is, under the right key."""
    headers = {"Authorization": f"Bearer {running.client.api_key}", "Content-Type": "application/json"}
    async with running.session.post(running.url + path, headers=headers, data=BytesIO(body)) as response:
        error: dict[str, Any] = (await response.json())["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return response.status, error


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"prompt": ""}, "prompt", "invalid_value"),
        ({"prompt": []}, "prompt", "invalid_value"),
        ({"prompt": [1] * (CONTEXT + 1)}, "prompt", "context_length_exceeded"),
        ({"prompt": [1] * 10, "max_tokens": CONTEXT}, "max_tokens", "context_length_exceeded"),
        ({"prompt": [49_152]}, "prompt", "invalid_value"),
        ({"prompt": "x", "max_tokens": "many"}, "max_tokens", "invalid_value"),
        ({"prompt": "x", "temperature": "hot"}, "temperature", "invalid_value"),
        ({"prompt": {"text": "x"}}, "prompt", "invalid_value"),
        ({"prompt": "x", "temprature": 1}, "temprature", "invalid_value"),
        ({"prompt": "x", "logprobs": 6}, "logprobs", "invalid_value"),
        ({"prompt": "x", "prompt_logprobs": 21}, "prompt_logprobs", "invalid_value"),
        ({"prompt": "x", "suffix": "y"}, "suffix", "unsupported_parameter"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_bad_field_is_a_400_that_names_it_and_takes_no_page(
    apart: Running, fields: dict[str, Any], param: str, code: str
) -> None:
    granted = await apart.metric("pdserve:handoffs_total", worker="decode-0")
    extra = {name: value for name, value in fields.items() if name != "prompt"}
    with pytest.raises(openai.BadRequestError) as raised:
        await apart.client.completions.create(model="default", prompt=fields["prompt"], extra_body=extra)
    assert (raised.value.param, raised.value.code, raised.value.type) == (param, code, "invalid_request_error")
    await apart.until_idle()
    assert await apart.metric("pdserve:handoffs_total", worker="decode-0") == granted


async def test_unknown_model_is_a_404_that_names_the_served_one(apart: Running) -> None:
    with pytest.raises(openai.NotFoundError, match="SmolLM2-135M-Instruct") as raised:
        await apart.client.completions.create(model="gpt-5", prompt="x")
    assert (raised.value.param, raised.value.code) == ("model", "model_not_found")


async def test_body_that_is_no_json_is_a_400(apart: Running) -> None:
    status, error = await refused(apart, "/v1/completions", b'{"model": "default", "prompt": ')
    assert (status, error["type"]) == (400, "invalid_request_error")
    assert "JSON" in error["message"]


async def test_body_that_is_too_large_is_a_413(apart: Running) -> None:
    body = b'{"model": "default", "prompt": "' + b"x" * (5 * MIB) + b'"}'
    status, error = await refused(apart, "/v1/completions", body)
    assert (status, error["type"]) == (413, "invalid_request_error")


async def test_unknown_path_is_a_404_in_openai_form(apart: Running) -> None:
    status, error = await refused(apart, "/v1/embeddings", b"{}")
    assert (status, error["type"]) == (404, "invalid_request_error")


async def test_bad_chat_message_is_a_400_that_names_it(apart: Running) -> None:
    messages: Any = [{"role": "wizard", "content": "x"}]
    with pytest.raises(openai.BadRequestError) as raised:
        await apart.client.chat.completions.create(model="default", messages=messages)
    assert raised.value.param == "messages[0].role"
