"""docs/api.md names every field that a request may have, honoured or refused."""

import re
from pathlib import Path

import pytest

from pdserve.gateway import responses_request, token_requests
from pdserve.gateway.chat_request import CHAT_NO_OPS, ChatRequest
from pdserve.gateway.completion_request import COMPLETION_NO_OPS, CompletionRequest
from pdserve.gateway.formats.parser_choice import ReasoningParserChoice, ToolParserChoice
from pdserve.gateway.message_fields import MESSAGE_NO_OPS, ChatMessage
from pdserve.gateway.structured_fields import StructuredOutputs
from pdserve.gateway.tool_fields import Function

DOC = Path(__file__).resolve().parents[2] / "docs" / "api.md"

FIELDS: dict[str, list[str]] = {
    "chat": [*ChatRequest.__struct_fields__, *CHAT_NO_OPS],
    "completions": [*CompletionRequest.__struct_fields__, *COMPLETION_NO_OPS],
    "messages": [*ChatMessage.__struct_fields__, *MESSAGE_NO_OPS],
    "responses": [*responses_request.ResponsesRequest.__struct_fields__, *responses_request.RESPONSES_NO_OPS],
    "tokens": [
        *token_requests.TokenizeText.__struct_fields__,
        *token_requests.TokenizeChatBody.__struct_fields__,
        *token_requests.DetokenizeRequest.__struct_fields__,
        *token_requests.CHAT_NO_OPS,
    ],
    "functions": list(Function.__struct_fields__),
    "parsers": [choice.value for choice in (*ToolParserChoice, *ReasoningParserChoice)],
}


@pytest.mark.parametrize("kind", FIELDS)
def test_api_document_names_every_field(kind: str) -> None:
    named = set(re.findall(r"[\w.-]+", " ".join(re.findall(r"`([^`]*)`", DOC.read_text(encoding="utf-8")))))
    assert [name for name in FIELDS[kind] if name not in named] == []


def test_api_document_names_every_form_of_structured_outputs() -> None:
    text = DOC.read_text(encoding="utf-8")
    assert all(f'`structured_outputs` `{{"{name}"}}`' in text for name in StructuredOutputs.__struct_fields__)
