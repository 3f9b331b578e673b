"""The bodies of `POST /tokenize` and `POST /detokenize`, as in vLLM."""

from typing import Annotated

import msgspec
from msgspec import Meta

from pdserve.errors import InvalidField
from pdserve.gateway.chat_options import ChatOptions
from pdserve.gateway.chat_request import parse_chat_request
from pdserve.gateway.fields import NoOps, convert, parse_object, without_no_ops
from pdserve.gateway.message_fields import ChatMessage
from pdserve.gateway.served_model import DEFAULT_MODEL

MAX_DETOKENIZED = 262_144
"""A body of small ids holds far more, and a token may be 128 characters: this keeps an answer under some tens of MB."""

TEXT_NO_OPS: NoOps = {"return_token_strs": (False,)}

CHAT_NO_OPS: NoOps = {
    **TEXT_NO_OPS,
    "add_special_tokens": (False,),
    "chat_template": (),
    "mm_processor_kwargs": ({},),
    "media_io_kwargs": ({},),
}

ModelName = Annotated[str, Meta(min_length=1)]


class TokenizeText(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    model: ModelName = DEFAULT_MODEL
    prompt: str
    add_special_tokens: bool = True


class TokenizeChatBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    model: ModelName = DEFAULT_MODEL
    messages: list[object]
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, object] | None = None
    tools: list[object] | None = None
    """These are what they are in a chat."""


class TokenizeChat(msgspec.Struct, frozen=True, kw_only=True):
    model: ModelName
    messages: list[ChatMessage]
    options: ChatOptions


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    model: ModelName = DEFAULT_MODEL
    tokens: Annotated[list[int], Meta(max_length=MAX_DETOKENIZED)]


def parse_tokenize_request(body: bytes) -> TokenizeText | TokenizeChat:
    """Raises: `InvalidField`, `UnsupportedField`."""
    fields = parse_object(body)
    if "messages" not in fields:
        return convert(without_no_ops(fields, TEXT_NO_OPS), TokenizeText)
    if "prompt" in fields:
        raise InvalidField("'prompt' and 'messages' exclude each other; send one of them", param="messages")
    chat = convert(without_no_ops(fields, CHAT_NO_OPS), TokenizeChatBody)
    read_as_chat = parse_chat_request(msgspec.json.encode(chat))
    return TokenizeChat(model=chat.model, messages=read_as_chat.messages, options=read_as_chat.options)


def parse_detokenize_request(body: bytes) -> DetokenizeRequest:
    """Raises: `InvalidField`."""
    return convert(parse_object(body), DetokenizeRequest)
