"""A client of OpenAI-compatible servers that notes when each token came, for benchmarks and verification."""

import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

from pdserve.errors import InternalError, PdserveError
from pdserve.telemetry.trace import TRACE_HEADER
from pdserve.units import ns_to_seconds
from pdserve.wire.bearer import bearer_headers

COMPLETIONS_PATH = "/v1/completions"


@dataclass(slots=True, kw_only=True)
class Answer:
    """One streamed answer. Instants are of this process's monotonic clock."""

    answer_id: str = ""
    text: str = ""
    token_ids: list[int] = field(default_factory=list[int])
    finish_reason: str | None = None
    sent_ns: int = 0
    token_ns: list[int] = field(default_factory=list[int])
    """Of each token, when its chunk came; of each chunk with text, from a server that does not send token ids."""
    status: int | None = None
    """Of the HTTP response; None until there is one."""
    num_generated: int | None = None
    """Tokens as the server counted them; None unless the usage was asked for and came."""

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
        self._headers = bearer_headers(api_key)

    async def complete(
        self, prompt: str | list[int], *, max_tokens: int, traced: bool = False, **fields: object
    ) -> Answer:
        """`POST /v1/completions`, greedy and streamed. Raises: `PdserveError` when there is no whole answer."""
        body = {"model": "default", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, **fields}
        return await self._whole(COMPLETIONS_PATH, body, traced=traced)

    async def chat(self, content: str, *, max_tokens: int, traced: bool = False, **fields: object) -> Answer:
        """`POST /v1/chat/completions` with one user message, greedy and streamed."""
        messages = [{"role": "user", "content": content}]
        body = {"model": "default", "messages": messages, "max_tokens": max_tokens, "temperature": 0, **fields}
        return await self._whole("/v1/chat/completions", body, traced=traced)

    async def workers(self) -> list[dict[str, Any]]:
        async with self._session.get(f"{self._url}/workers", headers=self._headers) as response:
            return (await response.json())["workers"]

    async def stream(self, path: str, body: bytes, answer: Answer, *, traced: bool = False) -> None:
        """Post a JSON body that asks for a stream, and fill `answer` as its chunks come.

        Raises: `PdserveError` when there is no whole answer; what came of one is in `answer` then.
        """
        headers = {**self._headers, "Content-Type": "application/json"}
        if traced:
            headers[TRACE_HEADER] = "1"
        answer.sent_ns = time.monotonic_ns()
        try:
            async with self._session.post(self._url + path, data=body, headers=headers) as response:
                answer.status = response.status
                if response.status != 200:
                    raise InternalError(f"{path} answered {response.status}: {(await response.text())[:500]}")
                async for event in stream_events(response):
                    _take(answer, event)
        except aiohttp.ClientError as error:
            raise PdserveError(f"can't reach {self._url}: {error}") from error
        except (KeyError, TypeError, ValueError, msgspec.DecodeError) as error:
            raise PdserveError(f"{self._url}{path} sent a chunk that can't be read: {error!r}") from error
        if answer.finish_reason is None:
            raise InternalError(f"the answer {answer.answer_id} broke off after {len(answer.token_ns)} tokens")

    async def _whole(self, path: str, body: dict[str, Any], *, traced: bool) -> Answer:
        answer = Answer()
        request = {**body, "stream": True, "return_token_ids": True}
        await self.stream(path, msgspec.json.encode(request), answer, traced=traced)
        return answer


async def stream_events(response: aiohttp.ClientResponse) -> AsyncGenerator[dict[str, Any]]:
    """The JSON of each server-sent event but the last, `[DONE]`. Raises: `msgspec.DecodeError`."""
    async for line in response.content:
        if line.startswith(b"data:") and (content := line[5:].strip()) != b"[DONE]":
            yield msgspec.json.decode(content)


def _take(answer: Answer, event: dict[str, Any]) -> None:
    now_ns = time.monotonic_ns()
    if "error" in event:
        raise InternalError(f"the answer {answer.answer_id} broke off: {event['error']['message']}")
    answer.answer_id = event["id"]
    for choice in event["choices"]:
        text = choice.get("text") or choice.get("delta", {}).get("content") or ""
        token_ids: list[int] | None = choice.get("token_ids")
        answer.text += text
        answer.token_ids += token_ids or []
        answer.token_ns += [now_ns] * (bool(text) if token_ids is None else len(token_ids))
        answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
    if event.get("usage"):
        answer.num_generated = event["usage"]["completion_tokens"]
