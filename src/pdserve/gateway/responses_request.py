"""The body of `POST /v1/responses`, for what this server can do: text in, text out, nothing stored."""

from typing import Annotated, Literal, assert_never, cast

import msgspec
from msgspec import Meta

from pdserve.errors import InvalidField, UnsupportedField
from pdserve.gateway.fields import NoOps, convert, parse_object, without_no_ops
from pdserve.gateway.grammar import ANY_OBJECT, of_schema
from pdserve.gateway.message_fields import ChatMessage
from pdserve.gateway.sampling_fields import SamplingFields
from pdserve.gateway.structured_fields import JsonSchemaFormat, Structure
from pdserve.sampling import MAX_TOP_LOGPROBS

RESPONSES_NO_OPS: NoOps = {
    "store": (False,),
    "previous_response_id": (),
    "conversation": (),
    "background": (False,),
    "background_options": ({},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "max_tool_calls": (),
    "reasoning": ({},),
    "truncation": ("disabled",),
    "context_management": ([],),
    "prompt": (),
    "prompt_cache_key": (),
    "prompt_cache_options": ({},),
    "prompt_cache_retention": (),
    "safety_identifier": (),
    "service_tier": ("auto", "default"),
    "stream_options": ({}, {"include_obfuscation": False}),
    "moderation": (),
    "access_programs": ({},),
    "image": ({},),
}
"""`store` is OpenAI's default when it is left out; here an answer then says that it was not stored."""

TEXT_NO_OPS: NoOps = {"verbosity": ("medium",)}

ITEM_NO_OPS: NoOps = {"phase": ()}

PART_NO_OPS: NoOps = {"annotations": ([],), "prompt_cache_breakpoint": ()}

LOGPROBS = "message.output_text.logprobs"
"""What can be asked for by `include`."""

MetadataKey = Annotated[str, Meta(max_length=64)]
MetadataValue = Annotated[str, Meta(max_length=512)]


class InputPart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    type: Literal["input_text", "output_text"]
    text: str
    logprobs: list[object] | None = None
    """Of an earlier answer; they change nothing."""


class InputMessage(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="message"
):
    """A message of the client's, or one of an earlier answer that it sends back."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[InputPart]
    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None

    @property
    def as_chat_message(self) -> ChatMessage:
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return ChatMessage(role=self.role, content=content)


class InputReasoning(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="reasoning"
):
    """Of an earlier answer; no part of the conversation, as chat templates leave earlier reasoning out."""

    summary: list[object]
    content: list[object] | None = None
    encrypted_content: str | None = None
    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None


class PlainText(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="text"):
    pass


class AnyJsonObject(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="json_object"):
    pass


class JsonOfSchema(JsonSchemaFormat, frozen=True, kw_only=True, tag_field="type", tag="json_schema"):
    pass


class ResponseText(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    format: PlainText | AnyJsonObject | JsonOfSchema | None = None

    @property
    def structure(self) -> Structure | None:
        match self.format:
            case None | PlainText():
                return None
            case AnyJsonObject():
                return Structure(param="text.format", grammar=of_schema(ANY_OBJECT), schema=ANY_OBJECT)
            case JsonOfSchema(schema=schema):
                return Structure(param="text.format.schema", grammar=of_schema(schema), schema=schema)
            case _:
                assert_never(self.format)


class _Sampling(SamplingFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a response asks of the sampler, as the other APIs do."""

    top_logprobs: int | None
    text: ResponseText

    @property
    def num_top_logprobs(self) -> int | None:
        return self.top_logprobs

    def structure(self) -> Structure | None:
        return self.text.structure


class ResponsesRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Ranges are OpenAI's; null means the default, as there."""

    model: Annotated[str, Meta(min_length=1)]
    input: str | list[InputMessage | InputReasoning]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Meta(ge=1)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    text: ResponseText | None = None
    include: list[Literal["message.output_text.logprobs"]] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    stream: bool | None = None
    metadata: Annotated[dict[MetadataKey, MetadataValue], Meta(max_length=16)] | None = None
    """Comes back in the answer; changes nothing."""
    user: str | None = None
    """Who asks, in the client's words; changes nothing."""

    @property
    def messages(self) -> list[ChatMessage]:
        """The conversation, instructions first."""
        instructions = [ChatMessage(role="system", content=self.instructions)] if self.instructions else []
        if isinstance(self.input, str):
            return [*instructions, ChatMessage(role="user", content=self.input)]
        said = [item.as_chat_message for item in self.input if isinstance(item, InputMessage)]
        return [*instructions, *said]

    @property
    def includes_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ())

    @property
    def text_format_body(self) -> object:
        text_format = None if self.text is None else self.text.format
        return msgspec.to_builtins(PlainText() if text_format is None else text_format)

    @property
    def sampling_fields(self) -> SamplingFields:
        return _Sampling(
            model=self.model,
            max_tokens=self.max_output_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_logprobs=(self.top_logprobs or 0) if self.includes_logprobs else None,
            text=self.text or ResponseText(),
        )


def parse_responses_request(body: bytes) -> ResponsesRequest:
    """Raises: `InvalidField`, `UnsupportedField`."""
    fields = without_no_ops(parse_object(body), RESPONSES_NO_OPS)
    text = fields.get("text")
    if isinstance(text, dict):
        fields["text"] = without_no_ops(cast("dict[str, object]", text), TEXT_NO_OPS, location="text.")
    include = fields.get("include")
    for asked in cast("list[object]", include) if isinstance(include, list) else ():
        if isinstance(asked, str) and asked != LOGPROBS:
            raise UnsupportedField(f"'include' has {asked!r}, which is not supported", param="include")
    items = fields.get("input")
    if isinstance(items, list):
        listed = cast("list[object]", items)
        fields["input"] = [_supported_item(item, location=f"input[{index}].") for index, item in enumerate(listed)]
    request = convert(fields, ResponsesRequest)
    if not request.input or not request.messages:
        raise InvalidField("'input' has no message", param="input")
    if request.top_logprobs and not request.includes_logprobs:
        raise InvalidField(f"'top_logprobs' needs 'include' to have '{LOGPROBS}'", param="top_logprobs")
    return request


def _supported_item(item: object, *, location: str) -> object:
    """The item without fields that ask for nothing, and with its type, which is that of a message where it has none.

    What is no object is left for `convert` to refuse.
    """
    if not isinstance(item, dict):
        return item
    fields: dict[str, object] = {"type": "message"}
    fields |= without_no_ops(cast("dict[str, object]", item), ITEM_NO_OPS, location=location)
    kind = fields.get("type")
    if isinstance(kind, str) and kind not in ("message", "reasoning"):
        raise UnsupportedField(f"items of type '{kind}' are not supported; send messages", param=f"{location}type")
    if kind == "reasoning":
        return fields
    content = fields.get("content")
    if isinstance(content, list):
        parts = cast("list[object]", content)
        fields["content"] = [
            _supported_part(part, location=f"{location}content[{index}].") for index, part in enumerate(parts)
        ]
    return fields


def _supported_part(part: object, *, location: str) -> object:
    if not isinstance(part, dict):
        return part
    fields = without_no_ops(cast("dict[str, object]", part), PART_NO_OPS, location=location)
    kind = fields.get("type")
    if isinstance(kind, str) and kind not in ("input_text", "output_text"):
        raise UnsupportedField(f"parts of type '{kind}' are not supported; send text", param=f"{location}type")
    return fields
