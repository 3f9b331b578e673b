"""A client that tells how its answer ended, whatever becomes of the gateway."""

import asyncio
import json
from dataclasses import dataclass
from enum import Enum
from typing import Any

import aiohttp

from pdserve.bench.api_client import stream_events


class Ending(Enum):
    FINISHED = "finished"
    """Whole, with a finish reason."""
    ERROR = "error"
    """An OpenAI error, as the body of a response or as the last event of a stream."""
    BROKEN = "broken"
    """The connection ended before the answer did."""
    TRUNCATED = "truncated"
    """Status 200, and no more, but neither a finish reason nor an error."""
    LEFT = "left"
    """The client itself hung up."""
    HUNG = "hung"
    """Nothing of this in time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    token_ids: tuple[int, ...]
    """All that came, up to the ending."""
    ending: Ending
    code: str = ""
    """Of an error: the one that its body has."""

    def __str__(self) -> str:
        how = f"{self.ending.value} {self.code}".strip()
        return f"{how} after {len(self.token_ids)} tokens"


class Asking:
    """One greedy streamed completion that is under way. Lifetime: `answer` or `leave` must be called."""

    def __init__(self, session: aiohttp.ClientSession, url: str, prompt: tuple[int, ...], *, max_tokens: int) -> None:
        self.answer_id: str | None = None
        """As soon as the first token has come; the gateway calls the request by it."""
        self._token_ids: list[int] = []
        self._finish_reason: str | None = None
        self._code = ""
        self._happened = asyncio.Event()
        """Set by each token, and by the end."""
        body = {"model": "default", "prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0}
        body |= {"ignore_eos": True, "stream": True, "return_token_ids": True}
        self._task = asyncio.create_task(self._ask(session, f"{url}/v1/completions", body))
        self._task.add_done_callback(lambda _: self._happened.set())

    async def until_tokens(self, count: int, *, timeout_s: float) -> bool:
        """Wait until so many tokens have come; false when the answer ends before. Raises: `TimeoutError`."""
        async with asyncio.timeout(timeout_s):
            while len(self._token_ids) < count and not self._task.done():
                self._happened.clear()
                await self._happened.wait()
        return len(self._token_ids) >= count

    async def answer(self, *, timeout_s: float) -> Answer:
        done, _ = await asyncio.wait({self._task}, timeout=timeout_s)
        if done:
            return self._answer(Ending.LEFT if self._task.cancelled() else self._task.result())
        await self.leave()
        return self._answer(Ending.HUNG)

    async def leave(self) -> None:
        """Hang up, if the answer has not ended."""
        self._task.cancel()
        await asyncio.wait({self._task})

    def _answer(self, ending: Ending) -> Answer:
        return Answer(token_ids=tuple(self._token_ids), ending=ending, code=self._code)

    async def _ask(self, session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> Ending:
        try:
            async with session.post(url, json=body) as response:
                if response.status != 200:
                    self._code = f"{response.status} {_code_of(await response.read())}"
                    return Ending.ERROR
                return await self._read(response)
        except aiohttp.ClientError:
            return Ending.BROKEN

    async def _read(self, response: aiohttp.ClientResponse) -> Ending:
        async for event in stream_events(response):
            if "error" in event:
                self._code = str(event["error"]["code"])
                return Ending.ERROR
            self._take(event)
        return Ending.FINISHED if self._finish_reason is not None else Ending.TRUNCATED

    def _take(self, event: dict[str, Any]) -> None:
        self.answer_id = event["id"]
        for choice in event["choices"]:
            self._token_ids += choice.get("token_ids") or []
            self._finish_reason = choice["finish_reason"] or self._finish_reason
        self._happened.set()


def _code_of(body: bytes) -> str:
    """Of an OpenAI error; `?` for anything else."""
    try:
        return str(json.loads(body)["error"]["code"])
    except (ValueError, KeyError, TypeError):
        return "?"
