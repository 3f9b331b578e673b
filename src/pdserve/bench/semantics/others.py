"""Cases of the endpoints beside the two completion APIs."""

from typing import Any

from pdserve.bench.semantics.case import NUM_TOKENS, Case, Check, Json
from pdserve.bench.semantics.completions import PERSON_SCHEMA, Texts

_QUESTION = "Why is the sea salty? Answer in one sentence."


def response_cases(texts: Texts) -> list[Case]:
    messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": _QUESTION}]
    json_format = {"type": "json_schema", "name": "person", "schema": PERSON_SCHEMA}
    return [
        _response("text", _QUESTION, _is_incomplete),
        _response("messages, instructions", messages, instructions="You are a sailor."),
        _response("to the end", "Say yes.", _is_completed, max_output_tokens=200),
        _response("a long text", texts.long),
        _response("metadata, top_p", _QUESTION, metadata={"ship": "Marlow"}, top_p=0.9),
        _response("logprobs", _QUESTION, include=["message.output_text.logprobs"], top_logprobs=2),
        _response(
            "json_schema", "Describe a sailor.", _is_completed, text={"format": json_format}, max_output_tokens=64
        ),
    ]


def token_cases(texts: Texts) -> list[Case]:
    messages = [{"role": "user", "content": _QUESTION}]
    return [
        Case(name="tokenize: text", path="/tokenize", body={"model": "default", "prompt": texts.medium}),
        Case(name="tokenize: messages", path="/tokenize", body={"model": "default", "messages": messages}),
        Case(name="detokenize", path="/detokenize", body={"model": "default", "tokens": list(texts.short_ids)}),
        Case(name="models", path="/v1/models", body=None),
        Case(name="one model", path="/v1/models/default", body=None),
    ]


def _response(name: str, asked: str | list[Any], check: Check | None = None, **fields: Any) -> Case:
    body = {"model": "default", "input": asked, "temperature": 0, "max_output_tokens": NUM_TOKENS, **fields}
    return Case(name=f"responses: {name}", path="/v1/responses", body=body, check=check)


def _is_completed(answer: Json) -> str | None:
    return _has_status(answer, "completed")


def _is_incomplete(answer: Json) -> str | None:
    return _has_status(answer, "incomplete")


def _has_status(answer: Json, status: str) -> str | None:
    response = answer.get("response", answer)
    return None if response.get("status") == status else f"the status is {response.get('status')!r}, not {status!r}"
