"""Stopping in good order: which requests run, and that none is let in any more."""

import asyncio
from collections.abc import Generator
from contextlib import contextmanager

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from pdserve.gateway.failures import SHUTTING_DOWN, RequestFailed, too_many_posted


class Drain:
    """Threads: the event loop's only."""

    def __init__(self) -> None:
        self.has_begun = False
        self.num_running = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @contextmanager
    def request(self) -> Generator[None]:
        """Around the work for one request. Raises: `RequestFailed` when the drain has begun."""
        if self.has_begun:
            raise RequestFailed(SHUTTING_DOWN)
        self.num_running += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.num_running -= 1
            if self.num_running == 0:
                self._idle.set()

    async def run(self, *, timeout_s: float) -> None:
        """Let nothing in any more, and return when nothing runs. Raises: `TimeoutError`."""
        self.has_begun = True
        async with asyncio.timeout(timeout_s):
            if self.num_running:
                await self._idle.wait()


def admit_requests(drain: Drain, *, max_posted: int) -> Middleware:
    """Everything that is posted is a request, of which `max_posted` run at a time, those whose bodies are on the way
    included; what probes, operators and workers ask is answered to the end.
    """

    @web.middleware
    async def admit(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.method != "POST":
            return await handler(request)
        if drain.num_running >= max_posted:
            raise RequestFailed(too_many_posted(max_posted))
        with drain.request():
            return await handler(request)

    return admit
