"""The body of `POST /v1/chat/completions`."""

from typing import Annotated, Literal, cast

import msgspec
from msgspec import Meta

from pdserve.errors import InvalidField, UnsupportedField
from pdserve.gateway.fields import NoOps, convert, parse_object, without_no_ops
from pdserve.gateway.sampling_fields import SHARED_NO_OPS, SamplingFields
from pdserve.sampling import MAX_TOP_LOGPROBS

CHAT_NO_OPS: NoOps = {
    **SHARED_NO_OPS,
    "best_of": (1,),
    "echo": (False,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "audio": (),
    "modalities": (["text"],),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "documents": ([],),
}

MESSAGE_NO_OPS: NoOps = {
    "name": (),
    "tool_calls": ([],),
    "tool_call_id": (),
    "function_call": (),
    "refusal": (),
    "audio": (),
    "annotations": ([],),
    "reasoning": (),
    "reasoning_content": (),
}


class TextPart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    type: Literal["text"]
    text: str


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]

    @property
    def as_template_input(self) -> dict[str, str]:
        """What chat templates know: `developer` is OpenAI's newer word for `system`, text parts are one text."""
        role = "system" if self.role == "developer" else self.role
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": role, "content": content}


class ChatRequest(SamplingFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    """OpenAI's newer name of `max_tokens`; wins where both are given."""
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def num_top_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def require_consistent(self) -> None:
        super().require_consistent()
        if self.top_logprobs and not self.logprobs:
            raise InvalidField("'top_logprobs' needs 'logprobs' to be true", param="top_logprobs")


def parse_chat_request(body: bytes) -> ChatRequest:
    """Raises: `InvalidField`, `UnsupportedField`."""
    fields = without_no_ops(parse_object(body), CHAT_NO_OPS)
    messages = fields.get("messages")
    if isinstance(messages, list):
        listed = cast("list[object]", messages)
        fields["messages"] = [_supported_message(message, index) for index, message in enumerate(listed)]
    request = convert(fields, ChatRequest)
    request.require_consistent()
    return request


def _supported_message(message: object, index: int) -> object:
    """The message without fields that ask for nothing; what is no object is left for `convert` to refuse."""
    if not isinstance(message, dict):
        return message
    fields = without_no_ops(cast("dict[str, object]", message), MESSAGE_NO_OPS, location=f"messages[{index}].")
    content = fields.get("content")
    if isinstance(content, list):
        for part_index, part in enumerate(cast("list[object]", content)):
            kind = cast("dict[str, object]", part).get("type") if isinstance(part, dict) else None
            if isinstance(kind, str) and kind != "text":
                raise UnsupportedField(
                    f"content parts of type '{kind}' are not supported; send text",
                    param=f"messages[{index}].content[{part_index}].type",
                )
    return fields
