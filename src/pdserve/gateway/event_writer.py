"""Server-sent events on their way to a client, with a name each or without."""

import asyncio
from collections.abc import Iterable

import msgspec
from aiohttp import web


class EventWriter:
    """Status and headers go with the first event: from then on a failure can only be an event.

    Raises: `ConnectionError` when the client is gone or does not take an event in time.
    """

    def __init__(self, request: web.Request, *, write_timeout_s: float) -> None:
        self._request = request
        self._write_timeout_s = write_timeout_s
        self.response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
        )

    @property
    def has_started(self) -> bool:
        return self.response.prepared

    async def send_all(self, events: Iterable[tuple[str, dict[str, object]]]) -> None:
        """Events of a name and a body each."""
        for name, body in events:
            await self._write(b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode(body)))

    async def send_data(self, data: bytes) -> None:
        await self._write(b"data: %b\n\n" % data)

    async def _write(self, event: bytes) -> None:
        try:
            async with asyncio.timeout(self._write_timeout_s):
                if not self.response.prepared:
                    await self.response.prepare(self._request)
                await self.response.write(event)
        except TimeoutError as error:
            if self._request.transport is not None:
                self._request.transport.abort()
            raise ConnectionAbortedError("the client does not read") from error
