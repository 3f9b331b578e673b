"""Several choices and several prompts in one request, as OpenAI's own client sees them, and what ends them early."""

import asyncio
import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

import openai
import pytest
from tests.process.gateway_under_test import RunningGateway, gateway
from tests.process.scripted_worker import Script, ScriptedWorker, join_message, joined, silent

from pdserve.sampling import TokenLogprobs
from pdserve.wire.cluster import Delta, FailureKind, FinishReason, Generate, TokenEntry

CHAT: Any = [{"role": "user", "content": "Hi"}]


def prompt_of(generate: Generate) -> str:
    return bytes(generate.prompt_token_ids).decode()


async def numbered(worker: ScriptedWorker, generate: Generate) -> None:
    """Choice 1 to prompt x is "x1 end" in two tokens, and so on; choice 0 is cut by its length."""
    for text in ("{prompt}{choice}", " end"):
        for choice in range(generate.num_choices):
            finish_reason = FinishReason.STOP if choice else FinishReason.LENGTH
            worker.deltas(
                Delta(
                    request_id=generate.request_id,
                    choice_index=choice,
                    token_ids=(choice,),
                    text=text.format(prompt=prompt_of(generate), choice=choice),
                    finish_reason=finish_reason if text == " end" else None,
                )
            )
        await asyncio.sleep(0)


def rated(logprobs: Sequence[Sequence[float]]) -> Script:
    """Each choice's tokens have these logprobs; its text says which one it is."""

    async def script(worker: ScriptedWorker, generate: Generate) -> None:
        for choice, of_tokens in enumerate(logprobs):
            entries = [
                TokenEntry(text_offset=0, logprobs=TokenLogprobs(token_id=65, logprob=logprob, top=()))
                for logprob in of_tokens
            ]
            worker.deltas(
                Delta(
                    request_id=generate.request_id,
                    choice_index=choice,
                    token_ids=(65,) * (len(of_tokens) + 1),
                    text=str(choice),
                    entries=tuple(entries),
                    finish_reason=FinishReason.STOP,
                )
            )

    return script


def by_prompt(scripts: dict[str, Script]) -> Script:
    async def script(worker: ScriptedWorker, generate: Generate) -> None:
        await scripts[prompt_of(generate)](worker, generate)

    return script


async def started(worker: ScriptedWorker, generate: Generate) -> None:
    worker.deltas(Delta(request_id=generate.request_id, token_ids=(1,), text=prompt_of(generate)))


async def refusing(worker: ScriptedWorker, generate: Generate) -> None:
    worker.fail(generate, FailureKind.INTERNAL, "the engine broke")


async def aborted_prompts(worker: ScriptedWorker, *, num_works: int) -> Counter[str]:
    """The prompts of as many works as are aborted; all of them were asked of this worker before."""
    aborts = [await asyncio.wait_for(worker.aborts.get(), 5) for _ in range(num_works)]
    generates = [worker.generates.get_nowait() for _ in range(worker.generates.qsize())]
    prompts = {generate.request_id: prompt_of(generate) for generate in generates}
    return Counter(prompts[abort.request_id] for abort in aborts)


async def test_chat_with_several_choices_has_each_by_index_with_its_own_end() -> None:
    async with gateway() as running, joined(running.url, join_message("d0"), numbered) as worker:
        answer = await running.client().chat.completions.create(model="smol", messages=CHAT, n=3, seed=7)
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        assert [choice.message.content for choice in answer.choices] == [f"<user>Hi{index} end" for index in range(3)]
        assert [choice.finish_reason for choice in answer.choices] == ["length", "stop", "stop"]
        assert answer.usage is not None
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (8, 6)
        assert answer.usage.prompt_tokens_details is not None
        assert answer.usage.prompt_tokens_details.cached_tokens == 0
        generate = worker.generates.get_nowait()
        assert (generate.num_choices, generate.sampling.seed) == (3, 7)
        assert await running.metric("vllm:request_success_total", finished_reason="length") == 1
        assert await running.metric("vllm:request_time_per_output_token_seconds_count") == 1


async def test_chat_with_several_choices_streams_each_under_its_index() -> None:
    async with gateway() as running, joined(running.url, join_message("d0"), numbered):
        stream = await running.client().chat.completions.create(
            model="smol", messages=CHAT, n=3, temperature=0, stream=True, stream_options={"include_usage": True}
        )
        *chunks, last = [chunk async for chunk in stream]
        for index in range(3):
            own = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == index]
            assert [choice.delta.role for choice in own] == ["assistant", None]
            assert "".join(choice.delta.content or "" for choice in own) == f"<user>Hi{index} end"
            assert [choice.finish_reason for choice in own] == [None, "stop" if index else "length"]
        assert last.choices == [] and last.usage is not None
        assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (8, 6)


async def test_best_of_returns_the_likeliest_choices_and_counts_the_tokens_of_all() -> None:
    script = rated([(-2.0, -2.0), (-0.5, -3.0, -1.0), (-1.0,), ()])
    async with gateway() as running, joined(running.url, join_message("d0"), script) as worker:
        completions = running.client().completions
        best = await completions.create(model="smol", prompt="x", best_of=4)
        assert [(choice.index, choice.text, choice.logprobs) for choice in best.choices] == [(0, "2", None)]
        assert best.usage is not None and best.usage.completion_tokens == 3 + 4 + 2 + 1
        generate = worker.generates.get_nowait()
        assert (generate.num_choices, generate.sampling.num_top_logprobs) == (4, 0)
        ranked = await completions.create(model="smol", prompt="x", best_of=4, n=4, logprobs=2)
        assert [choice.text for choice in ranked.choices] == ["0", "1", "2", "3"]
        ranked = await completions.create(model="smol", prompt="x", best_of=4, n=3, logprobs=2)
        assert [choice.text for choice in ranked.choices] == ["2", "1", "0"]
        assert ranked.choices[0].logprobs is not None and ranked.choices[0].logprobs.token_logprobs == [-1.0]
        assert worker.generates.get_nowait().sampling.num_top_logprobs == 2


@pytest.mark.parametrize("prompts", [["a", "b", "c"], [[97], [98], [99]]])
async def test_completion_of_several_prompts_has_each_ones_choices_in_order(prompts: Any) -> None:
    async with gateway() as running, joined(running.url, join_message("d0"), numbered) as worker:
        answer = await running.client().completions.create(model="smol", prompt=prompts, n=2, seed=5)
        assert [choice.index for choice in answer.choices] == list(range(6))
        assert [choice.text for choice in answer.choices] == [f"{prompt}{n} end" for prompt in "abc" for n in (0, 1)]
        assert answer.usage is not None
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 12)
        generates = [worker.generates.get_nowait() for _ in range(3)]
        assert {(generate.num_choices, generate.sampling.seed) for generate in generates} == {(2, 5)}
        assert len({generate.request_id for generate in generates}) == 3
        assert await running.metric("vllm:prompt_tokens_total") == 3


async def test_completion_of_several_prompts_streams_all_of_them_together() -> None:
    async with gateway() as running, joined(running.url, join_message("d0"), numbered):
        stream = await running.client().completions.create(
            model="smol", prompt=["a", "b", "c"], n=2, stream=True, stream_options={"include_usage": True}
        )
        *chunks, last = [chunk async for chunk in stream]
        texts = [""] * 6
        for chunk in chunks:
            texts[chunk.choices[0].index] += chunk.choices[0].text
        assert texts == [f"{prompt}{n} end" for prompt in "abc" for n in (0, 1)]
        ends = [chunk.choices[0].index for chunk in chunks if chunk.choices[0].finish_reason]
        assert sorted(ends) == list(range(6))
        assert last.usage is not None and (last.usage.prompt_tokens, last.usage.completion_tokens) == (3, 12)


async def test_completion_of_as_many_prompts_as_there_may_be_is_answered() -> None:
    async with gateway() as running, joined(running.url, join_message("d0"), numbered):
        prompts = [chr(65 + index % 26) for index in range(64)]
        answer = await running.client().completions.create(model="smol", prompt=prompts, n=2)
        assert [choice.text[0] for choice in answer.choices] == [prompt for prompt in prompts for _ in range(2)]


@pytest.mark.parametrize("stream", [False, True])
async def test_prompt_that_fails_before_anything_was_sent_fails_all_with_its_status(stream: bool) -> None:
    script = by_prompt({"a": silent, "b": refusing, "c": silent})
    async with gateway() as running, joined(running.url, join_message("d0"), script) as worker:
        body = {"model": "smol", "prompt": ["a", "b", "c"], "stream": stream}
        status, answer, _ = await running.post("/v1/completions", body)
        assert (status, answer["error"]["message"]) == (500, "the engine broke")
        assert await aborted_prompts(worker, num_works=2) == Counter("ac")
        assert await running.metric("pdserve:requests_failed_total", code="internal_error") == 1


async def test_prompt_that_fails_in_a_stream_ends_it_with_an_error_and_aborts_the_others() -> None:
    async def failing_later(worker: ScriptedWorker, generate: Generate) -> None:
        await asyncio.sleep(0.1)
        await refusing(worker, generate)

    script = by_prompt({"a": started, "b": failing_later})
    async with gateway() as running, joined(running.url, join_message("d0"), script) as worker:
        stream = await running.client().completions.create(model="smol", prompt=["a", "b"], stream=True)
        with pytest.raises(openai.APIError, match="the engine broke"):
            async for chunk in stream:
                assert (chunk.choices[0].index, chunk.choices[0].text) == (0, "a")
        assert await aborted_prompts(worker, num_works=1) == Counter("a")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("script", [silent, started])
async def test_client_that_leaves_aborts_all_its_prompts(stream: bool, script: Script) -> None:
    async with gateway() as running, joined(running.url, join_message("d0"), script) as worker:
        body = {"model": "smol", "prompt": ["a", "b", "c"], "n": 2, "stream": stream}
        client = asyncio.create_task(running.post("/v1/completions", body))
        generates = [await asyncio.wait_for(worker.generates.get(), 5) for _ in range(3)]
        client.cancel()
        aborts = [await asyncio.wait_for(worker.aborts.get(), 5) for _ in range(3)]
        assert {abort.request_id for abort in aborts} == {generate.request_id for generate in generates}
        await running.until_idle()
        assert await running.metric("pdserve:requests_cancelled_total") == 1


async def test_prompts_over_the_pending_bound_are_all_refused() -> None:
    async with gateway(max_pending=2) as running, joined(running.url, join_message("d0"), silent) as worker:
        with pytest.raises(openai.RateLimitError):
            await running.client().completions.create(model="smol", prompt=["a", "b", "c"])
        assert await aborted_prompts(worker, num_works=2) == Counter("ab")


async def test_prompt_whose_worker_is_lost_goes_on_elsewhere_and_the_others_are_kept() -> None:
    async def half_then_lost(worker: ScriptedWorker, generate: Generate) -> None:
        worker.deltas(
            Delta(
                request_id=generate.request_id,
                choice_index=1,
                token_ids=(1,),
                text="whole",
                finish_reason=FinishReason.STOP,
            ),
            Delta(request_id=generate.request_id, token_ids=(1,), text="half "),
        )
        await asyncio.sleep(0.1)
        worker.die()

    async def going_on(worker: ScriptedWorker, generate: Generate) -> None:
        if not generate.told:
            await numbered(worker, generate)
            return
        assert [choice.is_finished for choice in generate.told] == [False, True]
        rest = Delta(request_id=generate.request_id, token_ids=(2,), text="and half", finish_reason=FinishReason.STOP)
        worker.deltas(rest)

    async with (
        gateway() as running,
        joined(running.url, join_message("a"), half_then_lost) as first,
        joined(running.url, join_message("b"), going_on) as second,
    ):
        answer = await running.client().completions.create(model="smol", prompt=["a", "b"], n=2)
        assert [choice.text for choice in answer.choices] == ["half and half", "whole", "b0 end", "b1 end"]
        assert answer.usage is not None and answer.usage.completion_tokens == 3 + 4
        assert (first.generates.qsize(), second.generates.qsize()) == (1, 2)


async def test_stream_of_one_prompt_does_not_wait_for_another() -> None:
    async def endless(worker: ScriptedWorker, generate: Generate) -> None:
        while not worker.disconnected.is_set():
            worker.deltas(Delta(request_id=generate.request_id, token_ids=(1,), text="."))
            await asyncio.sleep(0.001)

    async with (
        gateway() as running,
        joined(running.url, join_message("d0"), by_prompt({"a": endless, "b": numbered})),
    ):
        events = events_until(running, {"model": "smol", "prompt": ["a", "b"], "stream": True}, "b0 end")
        assert await asyncio.wait_for(events, 5) > 0


async def test_stream_may_lag_as_many_steps_behind_with_many_choices_as_with_one() -> None:
    async def at_once(worker: ScriptedWorker, generate: Generate) -> None:
        steps = [(choice, step) for step in range(4) for choice in range(generate.num_choices)]
        worker.deltas(
            *(
                Delta(
                    request_id=generate.request_id,
                    choice_index=choice,
                    token_ids=(1,),
                    text=str(step),
                    finish_reason=FinishReason.LENGTH if step == 3 else None,
                )
                for choice, step in steps
            )
        )

    async with gateway(max_buffered_deltas=4) as running, joined(running.url, join_message("d0"), at_once):
        stream = await running.client().completions.create(model="smol", prompt="x", n=16, stream=True)
        texts = [""] * 16
        async for chunk in stream:
            texts[chunk.choices[0].index] += chunk.choices[0].text
        assert texts == ["0123"] * 16


async def events_until(running: RunningGateway, body: dict[str, Any], wanted: str) -> int:
    """Chunks of others until the text of one choice is as wanted; then the client leaves."""
    num_others, text = 0, ""
    async with running.session.post(running.url + "/v1/completions", json=body) as response:
        while text != wanted:
            line = await response.content.readline()
            if line.startswith(b"data: "):
                choice = json.loads(line.removeprefix(b"data: "))["choices"][0]
                if wanted.startswith(choice["text"]) or wanted.endswith(choice["text"]):
                    text += choice["text"]
                else:
                    num_others += 1
    return num_others


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"n": 0}, "n", "invalid_value"),
        ({"n": 129}, "n", "invalid_value"),
        ({"best_of": 2, "n": 3}, "best_of", "invalid_value"),
        ({"best_of": 2, "stream": True}, "best_of", "unsupported_parameter"),
        ({"prompt": ["a"] * 65}, "prompt", "invalid_value"),
        ({"prompt": ["a"] * 2, "n": 65}, "prompt", "invalid_value"),
        ({"prompt": ["a"] * 2, "best_of": 65}, "prompt", "invalid_value"),
        ({"prompt": ["a", ""]}, "prompt", "invalid_value"),
        ({"prompt": ["a", 1]}, "prompt", "invalid_value"),
        ({"prompt": ["a", [1]]}, "prompt", "invalid_value"),
        ({"prompt": [[1], [999]]}, "prompt", "invalid_value"),
        ({"prompt": ["a", "x" * 300]}, "prompt", "context_length_exceeded"),
    ],
)
async def test_choices_and_prompts_that_there_may_not_be_are_refused_by_field(
    fields: dict[str, Any], param: str, code: str
) -> None:
    async with gateway() as running, joined(running.url, join_message("d0")) as worker:
        arguments: dict[str, Any] = {"model": "smol", "prompt": "x", **fields}
        with pytest.raises(openai.BadRequestError) as raised:
            await running.client().completions.create(**arguments)
        assert (raised.value.param, raised.value.code) == (param, code)
        assert worker.generates.empty()
