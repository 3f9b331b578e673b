"""A small OpenAI-compatible server that is not ours: no token ids, several tokens a chunk, and faults on demand."""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

MODEL = "other"


@dataclass(slots=True, kw_only=True)
class OtherServer:
    """What it was asked, and what it does to the prompts of certain lengths."""

    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    statuses: dict[int, int] = field(default_factory=dict[int, int])
    """By the length of a prompt, an HTTP status other than 200."""
    broken: set[int] = field(default_factory=set[int])
    """Prompts whose stream ends after its first chunk."""
    silent: set[int] = field(default_factory=set[int])
    """Prompts that get their first chunk, and then nothing until the client leaves."""

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": MODEL, "object": "model"}]})

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        num_prompt_tokens = len(body["prompt"])
        self.bodies.append(body)
        if num_prompt_tokens in self.statuses:
            return web.json_response({"error": {"message": "not now"}}, status=self.statuses[num_prompt_tokens])
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        num_chunks = body["max_tokens"] // 2
        for number in range(num_chunks):
            finish_reason = "length" if number == num_chunks - 1 else None
            await _send(response, choices=[{"index": 0, "text": " a b", "finish_reason": finish_reason}])
            if num_prompt_tokens in self.broken:
                return response
            if num_prompt_tokens in self.silent:
                await asyncio.Event().wait()
        usage = {"prompt_tokens": num_prompt_tokens, "completion_tokens": 2 * num_chunks}
        await _send(response, choices=[], usage=usage)
        await response.write(b"data: [DONE]\n\n")
        return response


async def _send(response: web.StreamResponse, **fields: Any) -> None:
    chunk = {"id": "cmpl-1", "object": "text_completion", "model": MODEL, **fields}
    await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")


@asynccontextmanager
async def other_server() -> AsyncGenerator[OtherServer]:
    server = OtherServer()
    application = web.Application()
    application.add_routes([web.get("/v1/models", server.models), web.post("/v1/completions", server.completions)])
    runner = web.AppRunner(application, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0]
        server.url = f"http://{host}:{port}"
        yield server
    finally:
        await runner.cleanup()
