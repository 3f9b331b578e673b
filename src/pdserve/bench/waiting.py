"""Waiting with a deadline: for an event, or for something that only looking can tell."""

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


async def is_set_within(event: asyncio.Event, timeout_s: float) -> bool:
    """Whether the event came; returns as soon as it does."""
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return False
    return True
