"""OpenAI's answer bodies: whole, and as the chunks of a stream."""

from collections.abc import Sequence
from typing import Protocol, assert_never

from pdserve.gateway.logprobs import JsonObject, TokenBytes, chat_logprobs, completion_logprobs
from pdserve.wire.cluster import Delta, FinishReason, TokenEntry


class AnswerShape(Protocol):
    """What differs between the two completion APIs."""

    id_prefix: str
    object_name: str
    chunk_object_name: str

    def choice(self, text: str, finish_reason: FinishReason) -> JsonObject:
        """The one choice of a whole answer, without logprobs."""
        ...

    def chunk_choice(self, text: str, finish_reason: FinishReason | None, *, is_first: bool) -> JsonObject:
        """The one choice of a chunk, without logprobs."""
        ...

    def logprobs(self, entries: Sequence[TokenEntry], token_bytes: TokenBytes) -> JsonObject: ...


class ChatShape:
    id_prefix = "chatcmpl-"
    object_name = "chat.completion"
    chunk_object_name = "chat.completion.chunk"

    def choice(self, text: str, finish_reason: FinishReason) -> JsonObject:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": 0, "message": message, "logprobs": None, "finish_reason": finish_reason.value}

    def chunk_choice(self, text: str, finish_reason: FinishReason | None, *, is_first: bool) -> JsonObject:
        delta: JsonObject = {"role": "assistant"} if is_first else {}
        if text or is_first:
            delta["content"] = text
        return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": _value(finish_reason)}

    def logprobs(self, entries: Sequence[TokenEntry], token_bytes: TokenBytes) -> JsonObject:
        return chat_logprobs(entries, token_bytes)


class CompletionShape:
    id_prefix = "cmpl-"
    object_name = "text_completion"
    chunk_object_name = "text_completion"

    def choice(self, text: str, finish_reason: FinishReason) -> JsonObject:
        return {"index": 0, "text": text, "logprobs": None, "finish_reason": finish_reason.value}

    def chunk_choice(self, text: str, finish_reason: FinishReason | None, *, is_first: bool) -> JsonObject:
        return {"index": 0, "text": text, "logprobs": None, "finish_reason": _value(finish_reason)}

    def logprobs(self, entries: Sequence[TokenEntry], token_bytes: TokenBytes) -> JsonObject:
        return completion_logprobs(entries, token_bytes)


class AnswerWriter:
    """Bodies of one request's answer."""

    def __init__(
        self,
        shape: AnswerShape,
        *,
        answer_id: str,
        created_s: int,
        model_name: str,
        system_fingerprint: str,
        returns_token_ids: bool,
        includes_usage: bool,
        token_bytes: TokenBytes | None,
    ) -> None:
        """`token_bytes` is None where the client asked for no logprobs."""
        self._shape = shape
        self._token_bytes = token_bytes
        self._returns_token_ids = returns_token_ids
        self.includes_usage = includes_usage
        self._head: JsonObject = {
            "id": answer_id,
            "created": created_s,
            "model": model_name,
            "system_fingerprint": system_fingerprint,
        }

    def whole(
        self,
        text: str,
        token_ids: Sequence[int],
        entries: Sequence[TokenEntry],
        finish_reason: FinishReason,
        *,
        num_prompt_tokens: int,
    ) -> JsonObject:
        choice = self._shape.choice(text, finish_reason)
        if self._token_bytes is not None:
            choice["logprobs"] = self._shape.logprobs(entries, self._token_bytes)
        return {
            **self._head,
            "object": self._shape.object_name,
            "choices": [self._with_token_ids(choice, token_ids)],
            "usage": usage(num_prompt_tokens=num_prompt_tokens, num_tokens=len(token_ids)),
        }

    def says_something(self, delta: Delta) -> bool:
        """Whether the client learns anything by the chunk of this delta."""
        return bool(delta.text or delta.entries) or self._returns_token_ids

    def chunk(self, delta: Delta, *, is_first: bool) -> JsonObject:
        choice = self._shape.chunk_choice(delta.text, delta.finish_reason, is_first=is_first)
        if self._token_bytes is not None and delta.entries:
            choice["logprobs"] = self._shape.logprobs(delta.entries, self._token_bytes)
        return {
            **self._head,
            "object": self._shape.chunk_object_name,
            "choices": [self._with_token_ids(choice, delta.token_ids)],
            **({"usage": None} if self.includes_usage else {}),
        }

    def usage_chunk(self, *, num_prompt_tokens: int, num_tokens: int) -> JsonObject:
        """The last chunk, where the client asked for usage."""
        return {
            **self._head,
            "object": self._shape.chunk_object_name,
            "choices": [],
            "usage": usage(num_prompt_tokens=num_prompt_tokens, num_tokens=num_tokens),
        }

    def _with_token_ids(self, choice: JsonObject, token_ids: Sequence[int]) -> JsonObject:
        return {**choice, "token_ids": list(token_ids)} if self._returns_token_ids else choice


def usage(*, num_prompt_tokens: int, num_tokens: int) -> JsonObject:
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_tokens,
        "total_tokens": num_prompt_tokens + num_tokens,
    }


def _value(finish_reason: FinishReason | None) -> str | None:
    match finish_reason:
        case None:
            return None
        case FinishReason.STOP | FinishReason.LENGTH:
            return finish_reason.value
        case _:
            assert_never(finish_reason)
