"""Requests that must be refused, by the field's name."""

from typing import Any

from pdserve.bench.semantics.case import Case
from pdserve.bench.semantics.completions import PATH as COMPLETIONS

CHATS = "/v1/chat/completions"

_TOO_LARGE_BYTES = 9 * 1024 * 1024
"""Over the gateway's default bound of a body."""


def refusal_cases() -> list[Case]:
    return [
        _completion("empty prompt", "prompt", prompt=""),
        _completion("empty list of prompts", "prompt", prompt=[]),
        _completion("mixed prompts", "prompt", prompt=["a", [1, 2]]),
        _completion("token outside the vocabulary", "prompt", prompt=[10**8]),
        _completion("prompt over the context", "prompt", prompt="word " * 12_000),
        _completion("max_tokens over the context", "max_tokens", max_tokens=100_000),
        _completion("unknown model", "model", status=404, model="gpt-nope"),
        _completion("wrong type", "temperature", temperature="warm"),
        _completion("out of range", "top_p", top_p=1.5),
        _completion("negative", "max_tokens", max_tokens=-1),
        _completion("too many stops", "stop", stop=["a", "b", "c", "d", "e"]),
        _completion("unknown field", "temprature", temprature=1),
        _completion("logit_bias without a token", "logit_bias", logit_bias={"the": 1}),
        _completion("best_of under n", "best_of", n=3, best_of=2),
        _completion("best_of in a stream", "best_of", best_of=2, stream=True),
        _completion("too many choices", None, n=1000),
        _completion("stream_options without a stream", "stream_options", stream_options={"include_usage": True}),
        _completion("two grammars", None, guided_regex="a", guided_choice=["b"]),
        _completion("broken regular expression", None, guided_regex="(("),
        _completion("suffix", "suffix", suffix="the end"),
        *_chats(),
        Case(name="refused: broken JSON", path=CHATS, body=b'{"model": "default", ', status=400),
        Case(name="refused: no object", path=CHATS, body=b"[1, 2]", status=400),
        Case(name="refused: no UTF-8", path=COMPLETIONS, body=b'{"model": "\xff"}', status=400),
        Case(name="refused: body over the limit", path=COMPLETIONS, body=b" " * _TOO_LARGE_BYTES, status=413),
        Case(name="refused: no such path", path="/v1/nothing", body={}, status=404),
        Case(name="refused: wrong method", path=COMPLETIONS, body=None, status=405),
    ]


def _chats() -> list[Case]:
    broken_schema = {"type": "object", "properties": {"age": {"type": "number of years"}}}
    response_format = {"type": "json_schema", "json_schema": {"name": "broken", "schema": broken_schema}}
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://example.com/a.png"}}]}]
    return [
        _chat("no messages", "messages", messages=[]),
        _chat("unknown role", None, messages=[{"role": "king", "content": "hello"}]),
        _chat("image", "messages[0].content[0].type", messages=image),
        _chat(
            "broken schema", "response_format.json_schema.schema.properties.age.type", response_format=response_format
        ),
        _chat("tool_choice without tools", "tool_choice", tool_choice="required"),
        _chat("reasoning_effort without reasoning", "reasoning_effort", reasoning_effort="low"),
        _chat("top_logprobs without logprobs", "top_logprobs", top_logprobs=2),
    ]


def _completion(name: str, param: str | None, *, status: int = 400, **fields: Any) -> Case:
    body = {"model": "default", "prompt": "The sea", "max_tokens": 4, "temperature": 0, **fields}
    return Case(name=f"refused: {name}", path=COMPLETIONS, body=body, status=status, error_param=param)


def _chat(name: str, param: str | None, **fields: Any) -> Case:
    messages = [{"role": "user", "content": "Hello"}]
    body = {"model": "default", "messages": messages, "max_tokens": 4, "temperature": 0, **fields}
    return Case(name=f"refused: {name}", path=CHATS, body=body, status=400, error_param=param)
