"""What a response's output has beside its text: logprobs, a format, reasoning."""

import json
from typing import Any

import pytest
from openai.types.responses import Response
from tests.process.gateway_under_test import gateway
from tests.process.responses_client import (
    EVENTS_AFTER_TEXT,
    LOGPROBS,
    SCHEMA_FORMAT,
    create,
    events_of,
    final_response,
)
from tests.process.scripted_worker import ScriptedWorker, answering, join_message, joined

from pdserve.gateway.formats.parser_choice import ReasoningParserChoice
from pdserve.sampling import TokenLogprobs
from pdserve.wire.cluster import Delta, FinishReason, Generate, TokenEntry


async def two_tokens(worker: ScriptedWorker, generate: Generate) -> None:
    for text, logprob, finish_reason in (("a", -1.0, None), ("\u00e9", -2.0, FinishReason.STOP)):
        token_ids = tuple(text.encode())
        entries = [
            TokenEntry(text_offset=0, logprobs=TokenLogprobs(token_id=token_id, logprob=logprob, top=((98, -0.5),)))
            for token_id in token_ids
        ]
        worker.deltas(
            Delta(
                request_id=generate.request_id,
                token_ids=token_ids,
                text=text,
                entries=tuple(entries),
                finish_reason=finish_reason,
            )
        )


async def test_response_logprobs_are_in_the_part_and_in_the_events_of_its_text() -> None:
    async with gateway() as running, joined(running.url, join_message("d0"), two_tokens) as worker:
        response = await create(running, include=LOGPROBS, top_logprobs=1)
        assert worker.generates.get_nowait().sampling.num_top_logprobs == 1
        assert response.top_logprobs == 1
        (item,) = response.output
        assert item.type == "message" and item.content[0].type == "output_text"
        logprobs = item.content[0].logprobs
        assert logprobs is not None
        assert [(entry.token, entry.logprob, entry.bytes) for entry in logprobs] == [
            ("a", -1.0, [97]),
            ("bytes:\\xc3", -2.0, [0xC3]),
            ("bytes:\\xa9", -2.0, [0xA9]),
        ]
        assert [(top.token, top.logprob, top.bytes) for top in logprobs[0].top_logprobs] == [("b", -0.5, [98])]
        events = await events_of(running, include=LOGPROBS, top_logprobs=1)
        in_deltas = [
            entry.to_dict()
            for event in events
            if event.type == "response.output_text.delta"
            for entry in event.logprobs
        ]
        (done,) = [event for event in events if event.type == "response.output_text.done"]
        assert in_deltas == [entry.to_dict() for entry in done.logprobs]
        assert in_deltas[0] == {"token": "a", "logprob": -1.0, "top_logprobs": [{"token": "b", "logprob": -0.5}]}
        assert len(in_deltas) == 3
        assert final_response(events[-1]).output[0].to_dict()["content"] == item.to_dict()["content"]


@pytest.mark.parametrize("text_format", [{"type": "json_object"}, SCHEMA_FORMAT])
async def test_response_in_a_format_is_held_to_its_grammar(text_format: dict[str, Any]) -> None:
    async with gateway() as running, joined(running.url, join_message("d0"), answering(["{}"])) as worker:
        response = await create(running, text={"format": text_format})
        grammar = json.loads(worker.generates.get_nowait().sampling.grammar or "")
        schema = text_format.get("schema", {"type": "object"})
        assert schema.items() <= grammar["grammars"][0]["json_schema"].items()
        given: Any = response.to_dict()["text"]
        assert text_format.items() <= given["format"].items()


THINKING = ["<think>", "W", "hy", "</think>", "Be", "cause"]


async def test_response_of_a_model_that_reasons_has_it_in_an_item_of_its_own() -> None:
    parser = ReasoningParserChoice.THINK
    script = answering(THINKING)
    async with gateway(reasoning_parser=parser) as running, joined(running.url, join_message("d0"), script) as worker:
        response = await create(running)
        worker.generates.get_nowait()
        await create(running, input=[*response.output, {"role": "user", "content": "Go on"}], instructions="Hi")
        prompt = bytes(worker.generates.get_nowait().prompt_token_ids)
        assert prompt == b"<system>Hi<assistant>Because<user>Go on"
        reasoning, message = response.output
        assert reasoning.type == "reasoning" and reasoning.id.startswith("rs_") and reasoning.status == "completed"
        assert [part.text for part in reasoning.content or ()] == ["Why"]
        assert message.type == "message" and response.output_text == "Because"
        assert response.usage is not None
        assert response.usage.output_tokens_details.reasoning_tokens == 3
        events = await events_of(running)
        assert [event.type for event in events] == [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added",
            *["response.reasoning_text.delta"] * 2,
            "response.reasoning_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.output_item.added",
            "response.content_part.added",
            *["response.output_text.delta"] * 2,
            *EVENTS_AFTER_TEXT,
            "response.completed",
        ]
        indices = [event.to_dict().get("output_index") for event in events]
        assert indices == [None, None, *[0] * 7, *[1] * 7, None]
        streamed = final_response(events[-1])
        texts = [[part["text"] for part in item["content"]] for item in to_items(streamed)]
        assert texts == [["Why"], ["Because"]]
        assert streamed.usage == response.usage


def to_items(response: Response) -> list[dict[str, Any]]:
    output: Any = response.to_dict()["output"]
    return output


async def test_response_that_is_cut_in_its_reasoning_has_no_message() -> None:
    script = answering(THINKING[:3], finish_reason=FinishReason.LENGTH)
    parser = ReasoningParserChoice.THINK
    async with gateway(reasoning_parser=parser) as running, joined(running.url, join_message("d0"), script):
        response = await create(running)
        assert response.status == "incomplete"
        assert [(item["type"], item["status"]) for item in to_items(response)] == [("reasoning", "incomplete")]
