"""The items of a response's output, each with one part of text: its message, and the reasoning before it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from pdserve.gateway.logprobs import JsonObject, TokenBytes, listed_logprobs
from pdserve.wire.cluster import TokenEntry


class Status(Enum):
    """Of a response; of its items too, but for `FAILED`."""

    IN_PROGRESS = "in_progress"
    COMPLETED = "completed"
    INCOMPLETE = "incomplete"
    FAILED = "failed"


class ItemKind(Enum):
    """By the type of its text part, which the names of its events begin with."""

    MESSAGE = "output_text"
    REASONING = "reasoning_text"


@dataclass(slots=True, kw_only=True)
class OutputItem:
    kind: ItemKind
    item_id: str
    token_bytes: TokenBytes
    texts: list[str] = field(default_factory=list[str])
    entries: list[TokenEntry] = field(default_factory=list[TokenEntry])
    """Of its tokens, where the client asked for logprobs; a message's alone."""
    status: Status = Status.IN_PROGRESS

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def part(self) -> JsonObject:
        part: JsonObject = {"type": self.kind.value, "text": self.text}
        if self.kind is ItemKind.REASONING:
            return part
        return {**part, "annotations": [], "logprobs": listed_logprobs(self.entries, self.token_bytes)}

    def body(self, *, has_part: bool = True) -> JsonObject:
        """Without its part in the event that announces it."""
        content = [self.part] if has_part else []
        if self.kind is ItemKind.REASONING:
            kind: JsonObject = {"type": "reasoning", "summary": [], "encrypted_content": None}
        else:
            kind = {"type": "message", "role": "assistant"}
        return {"id": self.item_id, **kind, "status": self.status.value, "content": content}

    def delta_fields(self, text: str, entries: Sequence[TokenEntry]) -> JsonObject:
        return {"delta": text, **self._logprobs(entries)}

    @property
    def done_fields(self) -> JsonObject:
        return {"text": self.text, **self._logprobs(self.entries)}

    def _logprobs(self, entries: Sequence[TokenEntry]) -> JsonObject:
        if self.kind is ItemKind.REASONING:
            return {}
        return {"logprobs": listed_logprobs(entries, self.token_bytes, has_bytes=False)}
