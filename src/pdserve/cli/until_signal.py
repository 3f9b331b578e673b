"""Runs a service until SIGINT or SIGTERM; the second one ends the process at once."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable


def run_until_signal(service: Callable[[asyncio.Event], Awaitable[None]]) -> None:
    """Run `service(stop)`; the first signal sets `stop`, the second exits with 130 and leaves nothing to clean up."""

    async def run() -> None:
        stop = asyncio.Event()

        def on_signal() -> None:
            if stop.is_set():
                os._exit(130)
            stop.set()

        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, on_signal)
        await service(stop)

    asyncio.run(run())
