"""One prefill and one decode worker on SmolLM2, as OpenAI's client sees them."""

import asyncio
from typing import Any

import openai
import pytest
import torch
import transformers
from tests.process.deployment_under_test import CHUNK_TOKENS, Answer, Running, token_ids_in, token_ids_of
from tests.pure.tiny_checkpoints import reference_logits

from pdserve.model.source import ModelSource

pytestmark = pytest.mark.asyncio(loop_scope="session")

CHAT: Any = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]


async def test_chat_whole_answer_is_right_and_counts_its_tokens(apart: Running) -> None:
    answer = await apart.client.chat.completions.create(model="default", messages=CHAT, max_tokens=24, temperature=0)
    content, usage = answer.choices[0].message.content, answer.usage
    assert content is not None and "Paris" in content
    assert usage is not None and usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert 0 < usage.completion_tokens <= 24
    assert answer.choices[0].finish_reason == ("length" if usage.completion_tokens == 24 else "stop")


async def test_chat_streamed_answer_equals_the_whole_one(apart: Running) -> None:
    chats = apart.client.chat.completions
    name = "SmolLM2-135M-Instruct"
    whole = await chats.create(model=name, messages=CHAT, max_tokens=24, temperature=0)
    stream = await chats.create(
        model=name,
        messages=CHAT,
        max_tokens=24,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    *chunks, last = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert last.usage == whole.usage


@pytest.mark.parametrize("num_tokens", [2, 17, CHUNK_TOKENS, CHUNK_TOKENS + 1, 3 * CHUNK_TOKENS + 5])
async def test_completion_handed_over_equals_the_colocated_one(
    apart: Running, colocated: Running, text_ids: list[int], num_tokens: int
) -> None:
    prompt = text_ids[:num_tokens]
    num_local = await apart.metric("pdserve:prefill_local_total", worker="decode-0")
    answer = await apart.complete(prompt, max_tokens=16)
    assert answer == await colocated.complete(prompt, max_tokens=16)
    assert (answer.num_prompt_tokens, answer.num_tokens) == (num_tokens, len(answer.token_ids))
    assert await apart.metric("pdserve:prefill_local_total", worker="decode-0") == num_local


async def test_completion_of_a_one_token_prompt_is_prefilled_locally_as_routed(
    apart: Running, colocated: Running, text_ids: list[int]
) -> None:
    num_routed = await apart.metric("pdserve:prefill_local_total", worker="decode-0", reason="routed")
    answer = await apart.complete(text_ids[:1], max_tokens=8)
    assert answer == await colocated.complete(text_ids[:1], max_tokens=8)
    assert await apart.metric("pdserve:prefill_local_total", worker="decode-0", reason="routed") == num_routed + 1


async def test_completions_at_the_same_time_equal_those_one_by_one(apart: Running, text_ids: list[int]) -> None:
    prompts = [
        text_ids[start : start + num_tokens] for start, num_tokens in ((0, 130), (100, 20), (200, 75), (300, 40))
    ]
    alone: list[Answer] = [await apart.complete(prompt, max_tokens=24) for prompt in prompts]
    together = await asyncio.gather(*(apart.complete(prompt, max_tokens=24) for prompt in prompts))
    assert together == alone


async def test_completion_streamed_has_the_tokens_of_the_whole_one(apart: Running) -> None:
    text = "Once upon a time there was a lighthouse keeper who"
    answer = await apart.complete(text, max_tokens=8)
    stream = await apart.stream(text, max_tokens=8)
    assert await token_ids_of(stream) == answer.token_ids


async def test_sampling_with_a_seed_is_reproducible(apart: Running, text_ids: list[int]) -> None:
    async def sample(seed: int) -> tuple[int, ...]:
        answer = await apart.complete(text_ids[:30], max_tokens=16, temperature=1.0, top_p=0.95, seed=seed)
        return answer.token_ids

    first = await sample(1)
    assert await sample(1) == first
    assert await sample(2) != first


async def test_stop_string_ends_the_text_before_it(apart: Running, text_ids: list[int]) -> None:
    free = await apart.complete(text_ids[:50], max_tokens=24)
    words = free.text.split()
    stop = next(word for word in words[2:] if len(word) > 3)
    stopped = await apart.complete(text_ids[:50], max_tokens=24, stop=[stop])
    assert stopped.finish_reason == "stop"
    assert stopped.text == free.text.partition(stop)[0]
    assert stopped.num_tokens < free.num_tokens


async def test_stop_token_ends_the_answer_without_its_text_but_not_before_min_tokens(
    apart: Running, text_ids: list[int]
) -> None:
    free = await apart.complete(text_ids[:50], max_tokens=12, ignore_eos=True)
    stop = free.token_ids[3]
    stopped = await apart.complete(text_ids[:50], max_tokens=12, ignore_eos=True, stop_token_ids=[stop])
    assert (stopped.finish_reason, stopped.token_ids[-1]) == ("stop", stop)
    assert free.text.startswith(stopped.text) and len(stopped.text) < len(free.text)
    longer = await apart.complete(text_ids[:50], max_tokens=12, stop_token_ids=[stop], min_tokens=6)
    assert longer.num_tokens > 6 and stop not in longer.token_ids[:6]


async def test_logit_bias_forbids_a_token_and_forces_one(apart: Running, text_ids: list[int]) -> None:
    first = (await apart.complete(text_ids[:50], max_tokens=1)).token_ids[0]
    forced = await apart.complete(text_ids[:50], max_tokens=3, logit_bias={"42": 100})
    assert forced.token_ids == (42, 42, 42)
    free = await apart.complete(text_ids[:50], max_tokens=8, logit_bias={str(first): -100})
    assert first not in free.token_ids


async def test_min_p_of_one_is_greedy_whatever_the_temperature(apart: Running, text_ids: list[int]) -> None:
    greedy = await apart.complete(text_ids[:50], max_tokens=8)
    assert await apart.complete(text_ids[:50], max_tokens=8, temperature=2, min_p=1) == greedy


async def test_logprobs_are_those_of_transformers(apart: Running, model: ModelSource, text_ids: list[int]) -> None:
    prompt = text_ids[:50]
    answer = await apart.client.completions.create(
        model="default", prompt=prompt, max_tokens=8, temperature=0, logprobs=5, extra_body={"return_token_ids": True}
    )
    (choice,) = answer.choices
    token_ids = list(token_ids_in(choice))
    loader: Any = transformers.AutoModelForCausalLM
    reference = loader.from_pretrained(model.dir, dtype=torch.float32)
    expected_TV = reference_logits(reference, [*prompt, *token_ids])[49:-1].log_softmax(dim=-1)
    reported = choice.logprobs
    assert reported is not None and reported.top_logprobs is not None and reported.tokens is not None
    expected = [float(expected_V[token_id]) for expected_V, token_id in zip(expected_TV, token_ids, strict=True)]
    assert reported.token_logprobs == pytest.approx(expected, abs=1e-3)
    top = [sorted(by_text.values(), reverse=True) for by_text in reported.top_logprobs]
    assert torch.allclose(torch.tensor(top), expected_TV.topk(5).values, atol=1e-3)
    assert "".join(reported.tokens) == choice.text
    assert [choice.text[offset:] for offset in reported.text_offset or ()] == [
        "".join(reported.tokens[index:]) for index in range(8)
    ]


async def test_logprobs_of_a_chat_streamed_and_cut_by_a_stop_string_cover_its_text(apart: Running) -> None:
    chats = apart.client.chat.completions
    asked: Any = {"temperature": 0, "stop": "Paris", "logprobs": True, "top_logprobs": 2}
    whole = await chats.create(model="default", messages=CHAT, max_tokens=24, extra_body=asked)
    (choice,) = whole.choices
    assert choice.logprobs is not None and choice.logprobs.content is not None and choice.message.content
    text = "".join(entry.token for entry in choice.logprobs.content)
    assert text.startswith(choice.message.content)
    assert not "".join(entry.token for entry in choice.logprobs.content[:-1]).startswith(choice.message.content)
    assert all(entry.top_logprobs[0].logprob == entry.logprob for entry in choice.logprobs.content)
    stream = await chats.create(model="default", messages=CHAT, max_tokens=24, extra_body=asked, stream=True)
    reported = [chunk.choices[0].logprobs async for chunk in stream]
    assert [entry for logprobs in reported if logprobs for entry in logprobs.content or ()] == choice.logprobs.content


async def test_max_tokens_of_one_gives_the_first_token(apart: Running, text_ids: list[int]) -> None:
    one = await apart.complete(text_ids[:40], max_tokens=1)
    assert (one.num_tokens, one.finish_reason) == (1, "length")
    assert one.token_ids == (await apart.complete(text_ids[:40], max_tokens=4)).token_ids[:1]


async def test_metrics_of_all_three_show_a_handoff(apart: Running, text_ids: list[int]) -> None:
    async def counted() -> tuple[float, float, float, float]:
        return (
            await apart.metric("pdserve:bytes_pushed_total", worker="prefill-0"),
            await apart.metric("pdserve:handoff_seconds_count", worker="decode-0"),
            await apart.metric("pdserve:handoffs_total", worker="decode-0", outcome="landed"),
            await apart.metric("pdserve:prefills_total", place="remote"),
        )

    before = await counted()
    await apart.complete(text_ids[:100], max_tokens=2)
    pushed, handoffs, landed, remote = (now - then for now, then in zip(await counted(), before, strict=True))
    kv_bytes_a_token = 30 * 2 * 3 * 64 * 4
    assert 99 * kv_bytes_a_token <= pushed <= 2 * 99 * kv_bytes_a_token
    assert (handoffs, landed, remote) == (1, 1, 1)
    assert await apart.metric("pdserve:prefill_seconds_count", worker="prefill-0") > 0


async def test_api_key_that_is_wrong_is_a_401(apart: Running) -> None:
    wrong = apart.client.with_options(api_key="sk-wrong")
    with pytest.raises(openai.AuthenticationError) as raised:
        await wrong.completions.create(model="default", prompt="x")
    assert raised.value.code == "invalid_api_key"
    assert len((await apart.client.models.list()).data) == 2


@pytest.mark.parametrize("path", ["/metrics", "/debug/trace/x", "/debug/kv/x", "/peer"])
async def test_worker_without_the_cluster_secret_answers_401(apart: Running, path: str) -> None:
    url = (await apart.workers())["prefill-0"]["url"]
    for headers in ({}, {"Authorization": "Bearer wrong"}):
        async with apart.session.get(url + path, headers=headers) as response:
            assert response.status == 401


async def test_gateway_without_the_cluster_secret_takes_no_worker(apart: Running) -> None:
    async with apart.session.get(f"{apart.url}/cluster") as response:
        assert response.status == 401
