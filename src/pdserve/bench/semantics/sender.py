"""Sends cases to one gateway and brings their answers into a form in which they can be compared."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any, cast

import aiohttp

from pdserve.bench.semantics.case import Case, Json, Outcome
from pdserve.bench.semantics.streams import merge_completion, merge_response
from pdserve.errors import InternalError
from pdserve.wire.bearer import bearer_headers

CASE_TIMEOUT_S = 120.0

_VOLATILE = frozenset({"id", "created", "created_at", "completed_at", "item_id", "call_id", "tool_call_id"})
"""Keys whose values differ from one request to the next."""


class Sender:
    """Lifetime: of the session it is given."""

    def __init__(self, session: aiohttp.ClientSession, url: str, *, api_key: str | None = None) -> None:
        self._session = session
        self._url = url
        self._headers = {"Content-Type": "application/json", **bearer_headers(api_key)}

    async def send_all(self, cases: Sequence[Case], *, num_at_once: int) -> list[Outcome]:
        """The outcomes in the order of the cases; so many requests are under way at once."""
        room = asyncio.Semaphore(num_at_once)

        async def send(case: Case) -> Outcome:
            async with room:
                return await self.send(case)

        return list(await asyncio.gather(*map(send, cases)))

    async def send(self, case: Case) -> Outcome:
        """Raises: `InternalError` when the gateway can't be reached, or answers nothing that can be read."""
        method = "GET" if case.body is None else "POST"
        data = json.dumps(case.body).encode() if isinstance(case.body, dict) else case.body
        try:
            async with asyncio.timeout(CASE_TIMEOUT_S):
                async with self._session.request(
                    method, self._url + case.path, data=data, headers=self._headers
                ) as response:
                    text = await response.text()
                    return Outcome(status=response.status, answer=without_volatile(_answer(case, response, text)))
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise InternalError(f"case {case.name!r}: {type(error).__name__}: {error}") from error


def _answer(case: Case, response: aiohttp.ClientResponse, text: str) -> Json:
    if response.content_type != "text/event-stream":
        return json.loads(text)
    events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    if case.path == "/v1/responses":
        return merge_response([json.loads(event) for event in events])
    if not events or events.pop() != "[DONE]":
        return {"broken_stream": text[-300:]}
    return merge_completion([json.loads(event) for event in events])


def without_volatile(value: Any) -> Any:
    """The JSON value without what differs from one request to the next."""
    if isinstance(value, dict):
        return {key: without_volatile(inner) for key, inner in cast(Json, value).items() if key not in _VOLATILE}
    if isinstance(value, list):
        return [without_volatile(inner) for inner in cast(list[Any], value)]
    return value
