"""The bytes of a request."""

import asyncio

from aiohttp import web

from pdserve.gateway.failures import BODY_TIMED_OUT, RequestFailed


async def read_body(request: web.Request, *, timeout_s: float) -> bytes:
    """Raises: `RequestFailed` when the client takes longer to send it; aiohttp's 413 when it is too large."""
    try:
        async with asyncio.timeout(timeout_s):
            return await request.read()
    except TimeoutError as error:
        raise RequestFailed(BODY_TIMED_OUT) from error
