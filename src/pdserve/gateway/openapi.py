"""The gateway's OpenAPI document, made from the types that requests are converted to: it can't say anything else."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from pdserve.gateway.chat_request import ChatRequest
from pdserve.gateway.completion_request import CompletionRequest
from pdserve.gateway.logprobs import JsonObject
from pdserve.gateway.responses_request import ResponsesRequest
from pdserve.gateway.token_requests import DetokenizeRequest, TokenizeChatBody, TokenizeText

OPENAPI_VERSION = "3.1.0"
"""The first whose schemas are JSON Schema 2020-12, which msgspec writes."""

_REF_TEMPLATE = "#/components/schemas/{name}"

_STATUS_TEXTS = {
    400: "A field is wrong, unknown or not supported; `param` names it.",
    401: "The API key is missing or wrong.",
    404: "There is no such model.",
    408: "The body did not arrive in time.",
    413: "The body is over the limit.",
    429: "Too many requests; come back after `Retry-After` seconds.",
    500: "A bug; the log has more.",
    503: "No worker can take the request, or its worker was lost; come back after `Retry-After` seconds.",
    504: "The request took too long.",
}

_GENERATES = (400, 401, 404, 408, 413, 429, 500, 503, 504)
_READS_BODY = (400, 401, 404, 408, 413, 429)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Operation:
    method: str
    path: str
    summary: str
    bodies: tuple[type, ...] = ()
    """The types of body that it takes, one of them."""
    answer_keys: tuple[str, ...]
    """Of a whole answer."""
    streams: bool = False
    """Answers by server-sent events, where the client asks for them."""
    failures: tuple[int, ...] = ()


_OPERATIONS = (
    _Operation(
        method="post",
        path="/v1/chat/completions",
        summary="Continue a conversation",
        bodies=(ChatRequest,),
        answer_keys=("id", "object", "created", "model", "choices", "usage"),
        streams=True,
        failures=_GENERATES,
    ),
    _Operation(
        method="post",
        path="/v1/completions",
        summary="Continue a text",
        bodies=(CompletionRequest,),
        answer_keys=("id", "object", "created", "model", "choices", "usage"),
        streams=True,
        failures=_GENERATES,
    ),
    _Operation(
        method="post",
        path="/v1/responses",
        summary="Answer a text or a conversation",
        bodies=(ResponsesRequest,),
        answer_keys=("id", "object", "created_at", "model", "status", "output", "usage"),
        streams=True,
        failures=_GENERATES,
    ),
    _Operation(
        method="post",
        path="/tokenize",
        summary="The tokens of a text or a conversation",
        bodies=(TokenizeText, TokenizeChatBody),
        answer_keys=("count", "max_model_len", "tokens"),
        failures=(*_READS_BODY, 503),
    ),
    _Operation(
        method="post",
        path="/detokenize",
        summary="The text of tokens",
        bodies=(DetokenizeRequest,),
        answer_keys=("prompt",),
        failures=_READS_BODY,
    ),
    _Operation(
        method="get",
        path="/v1/models",
        summary="The models that can be asked for",
        answer_keys=("object", "data"),
        failures=(401,),
    ),
    _Operation(
        method="get",
        path="/v1/models/{name}",
        summary="One model",
        answer_keys=("id", "object", "created", "owned_by"),
        failures=(401, 404),
    ),
)


def openapi_document(*, version: str, model_names: Sequence[str]) -> JsonObject:
    """`version` is the package's; `model_names` are all that clients may ask for."""
    bodies = [body for operation in _OPERATIONS for body in operation.bodies]
    _, schemas = msgspec.json.schema_components(bodies, ref_template=_REF_TEMPLATE, schema_hook=_schema_of_any)
    model_schema: JsonObject = {"type": "string", "enum": list(model_names)}
    for schema in schemas.values():
        if "model" in schema.get("properties", {}):
            schema["properties"]["model"] = model_schema
    paths: dict[str, JsonObject] = {}
    for operation in _OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _operation(operation, model_schema)
    return {
        "openapi": OPENAPI_VERSION,
        "info": {"title": "pdserve", "version": version},
        "paths": paths,
        "components": {
            "schemas": {**schemas, "Error": _ERROR_SCHEMA},
            "securitySchemes": {"api_key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"api_key": []}],
    }


def _schema_of_any(kind: type) -> JsonObject:
    """Where a type says `object`, any JSON will do: what it must be is looked at later."""
    if kind is not object:
        raise NotImplementedError
    return {"description": "Any JSON value."}


def _operation(operation: _Operation, model_schema: JsonObject) -> JsonObject:
    described: JsonObject = {
        "summary": operation.summary,
        "responses": {
            "200": {"description": "The answer", "content": _answer_content(operation)},
            **{str(status): _failure(status) for status in operation.failures},
        },
    }
    if operation.bodies:
        described["requestBody"] = {"required": True, "content": {"application/json": {"schema": _body(operation)}}}
    if "{name}" in operation.path:
        described["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": model_schema}]
    return described


def _body(operation: _Operation) -> JsonObject:
    references: list[JsonObject] = [{"$ref": _REF_TEMPLATE.format(name=body.__name__)} for body in operation.bodies]
    return references[0] if len(references) == 1 else {"anyOf": references}


def _answer_content(operation: _Operation) -> JsonObject:
    schema = {"type": "object", "required": list(operation.answer_keys)}
    content: JsonObject = {"application/json": {"schema": schema}}
    if operation.streams:
        content["text/event-stream"] = {}
    return content


def _failure(status: int) -> JsonObject:
    schema: dict[str, Any] = {"$ref": _REF_TEMPLATE.format(name="Error")}
    return {"description": _STATUS_TEXTS[status], "content": {"application/json": {"schema": schema}}}


_ERROR_SCHEMA: JsonObject = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": "string"},
            },
        }
    },
}
