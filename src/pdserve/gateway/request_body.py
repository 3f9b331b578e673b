"""The bytes of requests, bounded for each and for all together."""

import asyncio

from aiohttp import web

from pdserve.gateway.failures import BODY_TIMED_OUT, RequestFailed, too_many_body_bytes


class RequestBodies:
    """Counts what has come of all bodies on the way; what is only announced costs nothing. Threads: the loop's only."""

    def __init__(self, *, timeout_s: float, max_body_bytes: int, max_bytes: int) -> None:
        self._timeout_s = timeout_s
        self._max_body_bytes = max_body_bytes
        self._max_bytes = max_bytes
        self._num_bytes = 0

    async def read(self, request: web.Request) -> bytes:
        """Raises: `RequestFailed` when it takes too long to come, or others leave no room; 413 when it is too large."""
        body = bytearray()
        try:
            async with asyncio.timeout(self._timeout_s):
                async for chunk in request.content.iter_any():
                    body += chunk
                    self._num_bytes += len(chunk)
                    self._require_room(body)
        except TimeoutError as error:
            raise RequestFailed(BODY_TIMED_OUT) from error
        finally:
            self._num_bytes -= len(body)
        return bytes(body)

    def _require_room(self, body: bytearray) -> None:
        if len(body) > self._max_body_bytes:
            raise web.HTTPRequestEntityTooLarge(max_size=self._max_body_bytes, actual_size=len(body))
        if self._num_bytes > self._max_bytes:
            raise RequestFailed(too_many_body_bytes(self._max_bytes))
