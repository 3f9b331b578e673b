"""`/v1/responses` and the token endpoints on SmolLM2, as clients see them."""

from typing import Any

import pytest
from openai.types.responses import ResponseCompletedEvent
from tests.process.deployment_under_test import API_KEY, Running

pytestmark = pytest.mark.asyncio(loop_scope="session")

INSTRUCTIONS = "Answer in one sentence."
QUESTION = "What is the capital of France?"


async def post(running: Running, path: str, body: dict[str, Any]) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {API_KEY}"}
    async with running.session.post(running.url + path, json=body, headers=headers) as response:
        assert response.status == 200
        return await response.json()


async def test_response_whole_and_streamed_is_what_a_chat_answers(apart: Running) -> None:
    chat = await apart.client.chat.completions.create(
        model="default",
        messages=[{"role": "system", "content": INSTRUCTIONS}, {"role": "user", "content": QUESTION}],
        temperature=0,
        max_tokens=64,
    )
    responses = apart.client.responses
    whole = await responses.create(
        model="default", instructions=INSTRUCTIONS, input=QUESTION, temperature=0, max_output_tokens=64
    )
    assert "Paris" in whole.output_text and whole.output_text == chat.choices[0].message.content
    assert whole.usage is not None and chat.usage is not None
    assert (whole.usage.input_tokens, whole.usage.output_tokens) == (
        chat.usage.prompt_tokens,
        chat.usage.completion_tokens,
    )
    stream = await responses.create(
        model="default", instructions=INSTRUCTIONS, input=QUESTION, temperature=0, max_output_tokens=64, stream=True
    )
    events = [event async for event in stream]
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    last = events[-1]
    assert isinstance(last, ResponseCompletedEvent)
    assert (last.response.output_text, last.response.usage) == (whole.output_text, whole.usage)


async def test_tokenized_chat_is_the_prompt_that_is_counted_and_detokenizes_to_the_template(apart: Running) -> None:
    messages: Any = [{"role": "user", "content": "Naïve 😀?"}]
    tokenized = await post(apart, "/tokenize", {"model": "default", "messages": messages})
    answer = await apart.client.chat.completions.create(model="default", messages=messages, max_tokens=1)
    assert answer.usage is not None and answer.usage.prompt_tokens == tokenized["count"] == len(tokenized["tokens"])
    text = (await post(apart, "/detokenize", {"tokens": tokenized["tokens"]}))["prompt"]
    assert "<|im_start|>user\nNaïve 😀?<|im_end|>" in text
    again = await post(apart, "/tokenize", {"prompt": text, "add_special_tokens": False})
    assert again == tokenized
    unprompted = await post(apart, "/tokenize", {"messages": messages, "add_generation_prompt": False})
    assert tokenized["tokens"][: unprompted["count"]] == unprompted["tokens"] != tokenized["tokens"]
