"""Responses as OpenAI's own client asks for them."""

from typing import Any

from openai.types.responses import (
    Response,
    ResponseCompletedEvent,
    ResponseFailedEvent,
    ResponseIncompleteEvent,
    ResponseStreamEvent,
)
from tests.process.gateway_under_test import RunningGateway

EVENTS_BEFORE_TEXT = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
]
EVENTS_AFTER_TEXT = ["response.output_text.done", "response.content_part.done", "response.output_item.done"]

SCHEMA_FORMAT: dict[str, Any] = {
    "type": "json_schema",
    "name": "weather",
    "schema": {"type": "object", "properties": {"sunny": {"type": "boolean"}}, "required": ["sunny"]},
}
LOGPROBS = ["message.output_text.logprobs"]


async def create(running: RunningGateway, **fields: Any) -> Response:
    arguments: dict[str, Any] = {"model": "smol", "input": "Hi", **fields}
    return await running.client().responses.create(**arguments, stream=False)


async def events_of(running: RunningGateway, **fields: Any) -> list[ResponseStreamEvent]:
    arguments: dict[str, Any] = {"model": "smol", "input": "Hi", **fields}
    stream = await running.client().responses.create(**arguments, stream=True)
    return [event async for event in stream]


def final_response(event: ResponseStreamEvent) -> Response:
    assert isinstance(event, ResponseCompletedEvent | ResponseIncompleteEvent | ResponseFailedEvent)
    return event.response
