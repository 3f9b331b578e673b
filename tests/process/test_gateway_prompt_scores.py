"""Prompts in answers: `echo`, and the logprobs of their tokens."""

from typing import Any

import openai
import pytest
from tests.process.gateway_under_test import gateway
from tests.process.scripted_worker import ScriptedWorker, join_message, joined

from pdserve.sampling import TokenLogprobs
from pdserve.wire.cluster import Delta, FinishReason, Generate, TokenEntry

CHAT: Any = [{"role": "user", "content": "Hi"}]
PROMPT = "n\u00e9e"
"""Four tokens of a byte each, three characters."""


def scored(token_id: int, logprob: float, *, num_top: int) -> TokenLogprobs:
    """The letter z is likelier than any token."""
    return TokenLogprobs(token_id=token_id, logprob=logprob, top=((122, -0.5), (token_id, logprob))[:num_top])


async def scoring(worker: ScriptedWorker, generate: Generate) -> None:
    """The prompt's logprobs, one a delta and each lower than the one before; then "!" for each choice."""
    num_top = generate.sampling.num_prompt_logprobs
    if num_top is not None:
        for index, token_id in enumerate(generate.prompt_token_ids[1:]):
            logprobs = scored(token_id, -1.0 - index, num_top=num_top)
            worker.deltas(Delta(request_id=generate.request_id, token_ids=(), text="", prompt_logprobs=(logprobs,)))
    entries: tuple[TokenEntry, ...] = ()
    if generate.sampling.num_top_logprobs is not None:
        entries = (TokenEntry(text_offset=0, logprobs=scored(33, -0.25, num_top=generate.sampling.num_top_logprobs)),)
    for choice in range(generate.num_choices):
        worker.deltas(
            Delta(
                request_id=generate.request_id,
                choice_index=choice,
                token_ids=(33,),
                text="!",
                entries=entries,
                finish_reason=FinishReason.STOP,
            )
        )


@pytest.mark.parametrize("prompt", [PROMPT, list(PROMPT.encode())])
async def test_echo_begins_each_answer_with_the_prompt(prompt: Any) -> None:
    async with gateway() as running, joined(running.url, join_message("d0"), scoring) as worker:
        completions = running.client().completions
        whole = await completions.create(model="smol", prompt=prompt, echo=True, n=2)
        assert [choice.text for choice in whole.choices] == [PROMPT + "!"] * 2
        assert whole.usage is not None and (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (4, 2)
        assert worker.generates.get_nowait().sampling.num_prompt_logprobs is None
        stream = await completions.create(model="smol", prompt=prompt, echo=True, n=2, stream=True)
        choices = [chunk.choices[0] async for chunk in stream]
        assert [(choice.index, choice.text) for choice in choices] == [(0, PROMPT), (0, "!"), (1, PROMPT), (1, "!")]
        assert [choice.finish_reason for choice in choices] == [None, "stop"] * 2


async def test_echo_with_logprobs_has_those_of_prompt_and_answer_in_one() -> None:
    async with gateway() as running, joined(running.url, join_message("d0"), scoring) as worker:
        completions = running.client().completions
        whole = (await completions.create(model="smol", prompt=PROMPT, echo=True, logprobs=1)).choices[0].logprobs
        sampling = worker.generates.get_nowait().sampling
        assert (sampling.num_prompt_logprobs, sampling.num_top_logprobs) == (1, 1)
        assert whole is not None
        assert whole.tokens == ["n", "bytes:\\xc3", "bytes:\\xa9", "e", "!"]
        assert whole.token_logprobs == [None, -1.0, -2.0, -3.0, -0.25]
        assert whole.text_offset == [0, 1, 1, 2, 3]
        assert whole.top_logprobs is not None
        assert whole.top_logprobs[0] is None
        assert whole.top_logprobs[3:] == [{"z": -0.5, "e": -3.0}, {"z": -0.5, "!": -0.25}]
        stream = await completions.create(model="smol", prompt=PROMPT, echo=True, logprobs=1, n=2, stream=True)
        by_choice: dict[int, list[Any]] = {0: [], 1: []}
        async for chunk in stream:
            by_choice[chunk.choices[0].index].append(chunk.choices[0].logprobs)
        for first, second in by_choice.values():
            assert first.tokens + second.tokens == whole.tokens
            assert first.token_logprobs + second.token_logprobs == whole.token_logprobs
            assert first.text_offset + second.text_offset == whole.text_offset
            assert first.top_logprobs + second.top_logprobs == whole.top_logprobs


SCORED_ALONE: dict[str, Any] = {
    "model": "smol",
    "prompt": [PROMPT, "ab"],
    "echo": True,
    "logprobs": 0,
    "max_tokens": 0,
    "extra_body": {"return_token_ids": True},
}


async def test_echo_of_no_new_tokens_scores_the_prompts_alone() -> None:
    async with gateway() as running, joined(running.url, join_message("d0"), scoring) as worker:
        answer = await running.client().completions.create(**SCORED_ALONE, stream=False)
        assert [(choice.text, choice.finish_reason) for choice in answer.choices] == [
            (PROMPT, "length"),
            ("ab", "length"),
        ]
        logprobs = answer.choices[1].logprobs
        assert logprobs is not None and logprobs.token_logprobs == [None, -1.0]
        assert [choice.to_dict()["token_ids"] for choice in answer.choices] == [[], []]
        assert answer.usage is not None
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (6, 0)
        assert worker.generates.get_nowait().sampling.max_tokens == 1


async def test_echo_of_no_new_tokens_streams_the_prompts_and_their_ends() -> None:
    async with gateway() as running, joined(running.url, join_message("d0"), scoring):
        stream = await running.client().completions.create(
            **SCORED_ALONE, stream=True, stream_options={"include_usage": True}
        )
        *chunks, last = [chunk async for chunk in stream]
        for index, prompt in enumerate((PROMPT, "ab")):
            first, end = (chunk.choices[0] for chunk in chunks if chunk.choices[0].index == index)
            assert (first.text, first.finish_reason, end.text, end.finish_reason) == (prompt, None, "", "length")
            assert first.logprobs is not None and end.logprobs is None
        assert last.usage is not None and (last.usage.prompt_tokens, last.usage.completion_tokens) == (6, 0)


async def test_echo_whose_worker_reports_too_few_tokens_is_a_500() -> None:
    async def forgetful(worker: ScriptedWorker, generate: Generate) -> None:
        worker.deltas(Delta(request_id=generate.request_id, token_ids=(1,), text="!", finish_reason=FinishReason.STOP))

    async with gateway() as running, joined(running.url, join_message("d0"), forgetful):
        for stream in (False, True):
            body = {"model": "smol", "prompt": "ab", "echo": True, "logprobs": 0, "stream": stream}
            status, answer, _ = await running.post("/v1/completions", body)
            assert (status, answer["error"]["code"]) == (500, "internal_error")


async def test_prompt_logprobs_are_by_token_id_in_each_choice_of_a_completion() -> None:
    async with gateway() as running, joined(running.url, join_message("d0"), scoring) as worker:
        answer = await running.client().completions.create(
            model="smol", prompt=PROMPT, n=2, extra_body={"prompt_logprobs": 1}
        )
        assert worker.generates.get_nowait().sampling.num_prompt_logprobs == 1
        first, second = (choice.to_dict()["prompt_logprobs"] for choice in answer.choices)
        assert first == second
        assert first == [
            None,
            {
                "195": {"logprob": -1.0, "rank": None, "decoded_token": "\ufffd"},
                "122": {"logprob": -0.5, "rank": 1, "decoded_token": "z"},
            },
            {
                "169": {"logprob": -2.0, "rank": None, "decoded_token": "\ufffd"},
                "122": {"logprob": -0.5, "rank": 1, "decoded_token": "z"},
            },
            {
                "101": {"logprob": -3.0, "rank": None, "decoded_token": "e"},
                "122": {"logprob": -0.5, "rank": 1, "decoded_token": "z"},
            },
        ]
        assert answer.choices[0].logprobs is None


async def test_prompt_logprobs_beside_echo_have_each_as_many_of_the_likeliest_as_asked() -> None:
    async with gateway() as running, joined(running.url, join_message("d0"), scoring) as worker:
        answer = await running.client().completions.create(
            model="smol", prompt="ab", echo=True, logprobs=0, extra_body={"prompt_logprobs": 2}
        )
        assert worker.generates.get_nowait().sampling.num_prompt_logprobs == 2
        (choice,) = answer.choices
        assert choice.logprobs is not None and choice.logprobs.top_logprobs is not None
        assert choice.logprobs.top_logprobs[:2] == [None, {"b": -1.0}]
        scores: Any = choice.to_dict()["prompt_logprobs"]
        assert [(token_id, score["rank"]) for token_id, score in scores[1].items()] == [("98", 2), ("122", 1)]


async def test_prompt_logprobs_are_beside_the_choices_of_a_chat() -> None:
    async with gateway() as running, joined(running.url, join_message("d0"), scoring):
        answer = await running.client().chat.completions.create(
            model="smol", messages=CHAT, n=2, extra_body={"prompt_logprobs": 0}
        )
        scores: Any = answer.to_dict()["prompt_logprobs"]
        assert scores[0] is None and [list(score) for score in scores[1:]] == [[str(byte)] for byte in b"user>Hi"]
        assert all("prompt_logprobs" not in choice.to_dict() for choice in answer.choices)


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"max_tokens": 0}, "max_tokens", "invalid_value"),
        ({"max_tokens": 0, "echo": True, "extra_body": {"min_tokens": 1}}, "min_tokens", "invalid_value"),
        ({"extra_body": {"prompt_logprobs": 21}}, "prompt_logprobs", "invalid_value"),
        ({"extra_body": {"prompt_logprobs": -1}}, "prompt_logprobs", "invalid_value"),
        ({"stream": True, "extra_body": {"prompt_logprobs": 0}}, "prompt_logprobs", "unsupported_parameter"),
        (
            {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
            "stream_options.continuous_usage_stats",
            "unsupported_parameter",
        ),
        (
            {"stream": True, "stream_options": {"include_obfuscation": True}},
            "stream_options.include_obfuscation",
            "unsupported_parameter",
        ),
    ],
)
async def test_scores_and_usage_that_there_are_not_are_refused_by_field(
    fields: dict[str, Any], param: str, code: str
) -> None:
    async with gateway() as running, joined(running.url, join_message("d0")) as worker:
        arguments: dict[str, Any] = {"model": "smol", "prompt": "x", **fields}
        with pytest.raises(openai.BadRequestError) as raised:
            await running.client().completions.create(**arguments)
        assert (raised.value.param, raised.value.code) == (param, code)
        assert worker.generates.empty()
