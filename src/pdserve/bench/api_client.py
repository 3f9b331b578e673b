"""A client of the gateway that notes when each token came; for benchmarks and verification, where every ns counts."""

import json
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from pdserve.errors import InternalError, PdserveError
from pdserve.telemetry.trace import TRACE_HEADER
from pdserve.units import ns_to_seconds


@dataclass(slots=True, kw_only=True)
class Answer:
    """One streamed answer. Instants are of this process's monotonic clock."""

    answer_id: str = ""
    text: str = ""
    token_ids: list[int] = field(default_factory=list[int])
    finish_reason: str | None = None
    sent_ns: int
    token_ns: list[int] = field(default_factory=list[int])
    """Of each token, when its chunk came."""

    @property
    def ttft_s(self) -> float:
        return ns_to_seconds(self.token_ns[0] - self.sent_ns)

    @property
    def gaps_s(self) -> list[float]:
        return [ns_to_seconds(after - before) for before, after in zip(self.token_ns, self.token_ns[1:], strict=False)]


class ApiClient:
    """Lifetime: of the session it is given."""

    def __init__(self, session: aiohttp.ClientSession, url: str, *, api_key: str | None = None) -> None:
        self._session = session
        self._url = url
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}

    async def complete(
        self, prompt: str | list[int], *, max_tokens: int, traced: bool = False, **fields: object
    ) -> Answer:
        """`POST /v1/completions`, greedy and streamed. Raises: `InternalError` when there is no whole answer."""
        body = {"model": "default", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, **fields}
        return await self._stream("/v1/completions", body, traced=traced)

    async def chat(self, content: str, *, max_tokens: int, traced: bool = False, **fields: object) -> Answer:
        """`POST /v1/chat/completions` with one user message, greedy and streamed."""
        messages = [{"role": "user", "content": content}]
        body = {"model": "default", "messages": messages, "max_tokens": max_tokens, "temperature": 0, **fields}
        return await self._stream("/v1/chat/completions", body, traced=traced)

    async def workers(self) -> list[dict[str, Any]]:
        async with self._session.get(f"{self._url}/workers", headers=self._headers) as response:
            return (await response.json())["workers"]

    async def _stream(self, path: str, body: dict[str, Any], *, traced: bool) -> Answer:
        headers = {**self._headers, **({TRACE_HEADER: "1"} if traced else {})}
        answer = Answer(sent_ns=time.monotonic_ns())
        request = {**body, "stream": True, "return_token_ids": True}
        try:
            async with self._session.post(self._url + path, json=request, headers=headers) as response:
                if response.status != 200:
                    raise InternalError(f"{path} answered {response.status}: {(await response.text())[:500]}")
                async for event in _events(response):
                    _take(answer, event)
        except aiohttp.ClientError as error:
            raise PdserveError(f"can't reach {self._url}: {error}") from error
        if answer.finish_reason is None:
            raise InternalError(f"the answer {answer.answer_id} broke off after {len(answer.token_ns)} tokens")
        return answer


async def _events(response: aiohttp.ClientResponse) -> AsyncGenerator[dict[str, Any]]:
    async for line in response.content:
        if line.startswith(b"data: ") and line != b"data: [DONE]\n":
            yield json.loads(line[6:])


def _take(answer: Answer, event: dict[str, Any]) -> None:
    if "error" in event:
        raise InternalError(f"the answer {answer.answer_id} broke off: {event['error']['message']}")
    answer.answer_id = event["id"]
    for choice in event["choices"]:
        answer.text += choice.get("text") or choice.get("delta", {}).get("content") or ""
        token_ids: list[int] = choice.get("token_ids") or []
        answer.token_ids += token_ids
        answer.token_ns += [time.monotonic_ns()] * len(token_ids)
        answer.finish_reason = choice["finish_reason"] or answer.finish_reason
