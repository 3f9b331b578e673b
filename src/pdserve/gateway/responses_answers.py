"""OpenAI's Responses objects: the whole answer, and the events of a stream."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import assert_never

from pdserve.errors import InternalError
from pdserve.gateway.chat_message import ReasoningTokens
from pdserve.gateway.chat_parser import (
    ChatParser,
    ChatPiece,
    ContentPiece,
    ReasoningPiece,
    ToolArguments,
    ToolCallStart,
)
from pdserve.gateway.failures import INVALID_REQUEST, OVERLOADED, Failure
from pdserve.gateway.logprobs import JsonObject, TokenBytes
from pdserve.gateway.responses_items import ItemKind, OutputItem, Status
from pdserve.gateway.responses_request import ResponsesRequest
from pdserve.wire.cluster import Delta, FinishReason, TokenEntry

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
    "tool_choice": "auto",
    "tools": [],
    "truncation": "disabled",
}
"""What a response says of the fields that have one supported value."""

ERROR_CODES: Mapping[str, str] = {OVERLOADED: "rate_limit_exceeded", INVALID_REQUEST: "invalid_prompt"}
"""From our error types to the codes that OpenAI lists for a failed response; `server_error` for the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """What there is to tell once the last token is there."""

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


class ResponseWriter:
    """Bodies of one response, whole and in events: a message, and before it reasoning where the model marks some.

    Requires: `opening`, then `read` of every delta, then `closing` or `failed`; `whole` after `closing`.
    """

    def __init__(
        self,
        request: ResponsesRequest,
        *,
        response_id: str,
        created_s: int,
        model_name: str,
        token_bytes: TokenBytes,
        parser: ChatParser,
    ) -> None:
        self._token_bytes = token_bytes
        self._parser = parser
        self._items: list[OutputItem] = []
        self._reasoning = ReasoningTokens()
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
            "text": {"format": request.text_format_body},
            "top_logprobs": request.top_logprobs or 0,
            **WITHOUT_CHOICE,
        }

    def opening(self) -> list[Event]:
        started = self._response(Status.IN_PROGRESS)
        return [
            self._event("response.created", {"response": started}),
            self._event("response.in_progress", {"response": started}),
        ]

    def read(self, delta: Delta) -> list[Event]:
        """What the client learns by this delta."""
        pieces = self._parser.feed(delta.text)
        if delta.finish_reason is not None:
            pieces = [*pieces, *self._parser.finish()]
        self._reasoning.add(len(delta.token_ids), pieces)
        events: list[Event] = []
        entries = delta.entries
        for piece in pieces:
            kind, text = _text_of(piece)
            events += self._open(kind)
            if kind is ItemKind.MESSAGE:
                events.append(self._delta(text, entries))
                entries = ()
            else:
                events.append(self._delta(text, ()))
        if entries and self._is_open(ItemKind.MESSAGE):
            events.append(self._delta("", entries))
        return events

    def closing(self, ending: Ending) -> list[Event]:
        """The last one is `response.completed`, or `response.incomplete` where a limit ended it."""
        events = [] if self._items else self._open(ItemKind.MESSAGE)
        events += self._close(ending.status)
        events.append(self._event(f"response.{ending.status.value}", {"response": self.whole(ending)}))
        return events

    def whole(self, ending: Ending) -> JsonObject:
        is_complete = ending.status is Status.COMPLETED
        return self._response(
            ending.status,
            completed_at=ending.finished_s if is_complete else None,
            incomplete_details=None if is_complete else {"reason": "max_output_tokens"},
            usage={
                "input_tokens": ending.num_prompt_tokens,
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": ending.num_tokens,
                "output_tokens_details": {"reasoning_tokens": self._reasoning.num_tokens},
                "total_tokens": ending.num_prompt_tokens + ending.num_tokens,
            },
        )

    def failed(self, failure: Failure) -> Event:
        """The end of a stream that can't go on, with what was sent."""
        if self._items:
            self._items[-1].status = Status.INCOMPLETE
        error = {
            "code": ERROR_CODES.get(failure.type, "server_error"),
            "message": failure.message,
            "param": failure.param,
            "type": failure.type,
        }
        return self._event("response.failed", {"response": self._response(Status.FAILED, error=error)})

    def _response(self, status: Status, **known: object) -> JsonObject:
        output = [item.body() for item in self._items]
        return {**self._head, **UNFINISHED, "status": status.value, "output": output, **known}

    def _is_open(self, kind: ItemKind) -> bool:
        return bool(self._items) and self._items[-1].kind is kind

    def _open(self, kind: ItemKind) -> list[Event]:
        """The item of this kind is the last one, and open."""
        if self._is_open(kind):
            return []
        events = self._close(Status.COMPLETED) if self._items else []
        prefix = "rs_" if kind is ItemKind.REASONING else "msg_"
        item = OutputItem(kind=kind, item_id=prefix + secrets.token_hex(16), token_bytes=self._token_bytes)
        self._items.append(item)
        return [
            *events,
            self._item_event("response.output_item.added", item.body(has_part=False)),
            self._part_event("response.content_part.added", {"part": item.part}),
        ]

    def _delta(self, text: str, entries: Sequence[TokenEntry]) -> Event:
        item = self._items[-1]
        item.texts.append(text)
        item.entries += entries
        return self._part_event(f"response.{item.kind.value}.delta", item.delta_fields(text, entries))

    def _close(self, status: Status) -> list[Event]:
        item = self._items[-1]
        item.status = status
        return [
            self._part_event(f"response.{item.kind.value}.done", item.done_fields),
            self._part_event("response.content_part.done", {"part": item.part}),
            self._item_event("response.output_item.done", item.body()),
        ]

    def _item_event(self, event_type: str, item: JsonObject) -> Event:
        return self._event(event_type, {"output_index": len(self._items) - 1, "item": item})

    def _part_event(self, event_type: str, fields: JsonObject) -> Event:
        place = {"item_id": self._items[-1].item_id, "output_index": len(self._items) - 1, "content_index": 0}
        return self._event(event_type, {**place, **fields})

    def _event(self, event_type: str, fields: JsonObject) -> Event:
        event = {"type": event_type, "sequence_number": self._sequence_number, **fields}
        self._sequence_number += 1
        return event_type, event


def _text_of(piece: ChatPiece) -> tuple[ItemKind, str]:
    match piece:
        case ContentPiece(text):
            return ItemKind.MESSAGE, text
        case ReasoningPiece(text):
            return ItemKind.REASONING, text
        case ToolCallStart() | ToolArguments():
            raise InternalError("an answer without tools calls one")
        case _:
            assert_never(piece)
