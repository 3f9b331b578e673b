"""OpenAI's Responses objects: the whole answer, and the events of a stream."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import assert_never

from pdserve.gateway.failures import INVALID_REQUEST, OVERLOADED, Failure
from pdserve.gateway.logprobs import JsonObject, TokenBytes, listed_logprobs
from pdserve.gateway.responses_request import ResponsesRequest
from pdserve.wire.cluster import FinishReason, TokenEntry

Event = tuple[str, JsonObject]
"""Its type, which is in the body too, and its body."""

UNFINISHED: JsonObject = {"completed_at": None, "error": None, "incomplete_details": None, "usage": None}

WITHOUT_CHOICE: JsonObject = {
    "background": False,
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "reasoning": {"effort": None, "summary": None},
    "service_tier": "default",
    "store": False,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "truncation": "disabled",
}
"""What a response says of the fields that have one supported value."""

ERROR_CODES: Mapping[str, str] = {OVERLOADED: "rate_limit_exceeded", INVALID_REQUEST: "invalid_prompt"}
"""From our error types to the codes that OpenAI lists for a failed response; `server_error` for the others."""


class Status(Enum):
    """Of a response; of its message too, but for `FAILED`."""

    IN_PROGRESS = "in_progress"
    COMPLETED = "completed"
    INCOMPLETE = "incomplete"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """What there is to tell once the last token is there."""

    text: str
    entries: Sequence[TokenEntry]
    """Of its tokens, where the client asked for logprobs."""
    finish_reason: FinishReason
    finished_s: int
    num_prompt_tokens: int
    num_tokens: int

    @property
    def status(self) -> Status:
        match self.finish_reason:
            case FinishReason.STOP:
                return Status.COMPLETED
            case FinishReason.LENGTH:
                return Status.INCOMPLETE
            case _:
                assert_never(self.finish_reason)

    @property
    def usage(self) -> JsonObject:
        return {
            "input_tokens": self.num_prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": self.num_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": self.num_prompt_tokens + self.num_tokens,
        }


class ResponseWriter:
    """Bodies of one response: one message with one text part.

    Requires: for a stream, `opening`, then `delta` any number of times, then `closing` or `failed`, in this order.
    """

    def __init__(
        self,
        request: ResponsesRequest,
        *,
        response_id: str,
        item_id: str,
        created_s: int,
        model_name: str,
        token_bytes: TokenBytes,
    ) -> None:
        self._item_id = item_id
        self._token_bytes = token_bytes
        self._sequence_number = 0
        self._head: JsonObject = {
            "id": response_id,
            "object": "response",
            "created_at": created_s,
            "model": model_name,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "temperature": 1.0 if request.temperature is None else request.temperature,
            "top_p": 1.0 if request.top_p is None else request.top_p,
            "metadata": request.metadata or {},
            "user": request.user,
            "top_logprobs": request.top_logprobs or 0,
            **WITHOUT_CHOICE,
        }

    def whole(self, generation: Generation) -> JsonObject:
        status = generation.status
        is_complete = status is Status.COMPLETED
        return {
            **self._head,
            **UNFINISHED,
            "status": status.value,
            "completed_at": generation.finished_s if is_complete else None,
            "incomplete_details": None if is_complete else {"reason": "max_output_tokens"},
            "output": [self._item(status, self._text_part(generation.text, generation.entries))],
            "usage": generation.usage,
        }

    def opening(self) -> list[Event]:
        no_output: list[JsonObject] = []
        started = {**self._head, **UNFINISHED, "status": Status.IN_PROGRESS.value, "output": no_output}
        return [
            self._event("response.created", {"response": started}),
            self._event("response.in_progress", {"response": started}),
            self._item_event("response.output_item.added", self._item(Status.IN_PROGRESS)),
            self._part_event("response.content_part.added", {"part": self._text_part("", ())}),
        ]

    def delta(self, text: str, entries: Sequence[TokenEntry]) -> Event:
        logprobs = listed_logprobs(entries, self._token_bytes, has_bytes=False)
        return self._part_event("response.output_text.delta", {"delta": text, "logprobs": logprobs})

    def closing(self, generation: Generation) -> list[Event]:
        """The last one is `response.completed`, or `response.incomplete` where a limit ended it."""
        part = self._text_part(generation.text, generation.entries)
        logprobs = listed_logprobs(generation.entries, self._token_bytes, has_bytes=False)
        return [
            self._part_event("response.output_text.done", {"text": generation.text, "logprobs": logprobs}),
            self._part_event("response.content_part.done", {"part": part}),
            self._item_event("response.output_item.done", self._item(generation.status, part)),
            self._event(f"response.{generation.status.value}", {"response": self.whole(generation)}),
        ]

    def failed(self, text: str, failure: Failure) -> Event:
        """The end of a stream that can't go on, with the text that was sent."""
        response = {
            **self._head,
            **UNFINISHED,
            "status": Status.FAILED.value,
            "error": {
                "code": ERROR_CODES.get(failure.type, "server_error"),
                "message": failure.message,
                "param": failure.param,
                "type": failure.type,
            },
            "output": [self._item(Status.INCOMPLETE, self._text_part(text, ()))],
        }
        return self._event("response.failed", {"response": response})

    def _item(self, status: Status, *content: JsonObject) -> JsonObject:
        return {
            "id": self._item_id,
            "type": "message",
            "role": "assistant",
            "status": status.value,
            "content": list(content),
        }

    def _item_event(self, event_type: str, item: JsonObject) -> Event:
        return self._event(event_type, {"output_index": 0, "item": item})

    def _part_event(self, event_type: str, fields: JsonObject) -> Event:
        return self._event(event_type, {"item_id": self._item_id, "output_index": 0, "content_index": 0, **fields})

    def _event(self, event_type: str, fields: JsonObject) -> Event:
        event = {"type": event_type, "sequence_number": self._sequence_number, **fields}
        self._sequence_number += 1
        return event_type, event

    def _text_part(self, text: str, entries: Sequence[TokenEntry]) -> JsonObject:
        logprobs = listed_logprobs(entries, self._token_bytes)
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
