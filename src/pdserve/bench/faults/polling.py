"""Waiting for something that only looking can tell, with a deadline."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

POLL_S = 0.02

T = TypeVar("T")


async def until(read: Callable[[], Awaitable[T]], accepts: Callable[[T], bool], *, timeout_s: float) -> T:
    """The first value that is accepted. Raises: `TimeoutError`."""
    async with asyncio.timeout(timeout_s):
        while True:
            value = await read()
            if accepts(value):
                return value
            await asyncio.sleep(POLL_S)
