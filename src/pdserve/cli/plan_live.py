"""`pdserve plan --from`: the load that a running gateway has, read from its metrics over a while."""

import asyncio
import contextlib
import time
from collections.abc import Mapping

import aiohttp

from pdserve.cli.progress import say
from pdserve.cli.until_signal import run_until_signal
from pdserve.config import environment
from pdserve.errors import ConfigError
from pdserve.planner.live import GatewayReading, SeenLoad, read_exposition, seen_load
from pdserve.wire.bearer import bearer_headers

READ_TIMEOUT_S = 10.0
NUM_INTERVALS = 60
"""Between readings, so that a gateway that starts anew meanwhile is noticed; a shorter window has fewer."""
LEAST_INTERVAL_S = 0.25


def read_live_load(url: str, *, window_s: float) -> SeenLoad:
    """Prints what it saw, also when it is interrupted.

    Raises: `ConfigError` when there is no pdserve gateway or no load; `KeyboardInterrupt` when it was interrupted.
    """
    reader = LoadReader(url, window_s)
    run_until_signal(reader.run)
    try:
        seen = seen_load(reader.readings)
    except ConfigError as error:
        if reader.was_stopped:
            raise KeyboardInterrupt from error
        raise ConfigError(f"{url}: {error.message}") from error
    say(seen_line(seen, url))
    if reader.was_stopped:
        raise KeyboardInterrupt
    return seen


def seen_line(seen: SeenLoad, url: str) -> str:
    line = (
        f"{url} in {seen.window_s:.0f} s: {seen.rate_per_s:.3g} requests/s, {seen.num_answered} answered, prompts of "
        f"{seen.prompts.mean:.0f} tokens (varying by {seen.prompts.cv:.0%}), answers of {seen.answers.mean:.0f} "
        f"(by {seen.answers.cv:.0%})"
    )
    if seen.num_cancelled:
        line += f"; {seen.num_cancelled} were cancelled"
    if seen.num_failed:
        line += f"; {seen.num_failed} more failed or were refused and are not planned for"
    return line


class LoadReader:
    """Has the readings that it has come to, however it ends."""

    def __init__(self, url: str, window_s: float) -> None:
        self._url = url
        self._window_s = window_s
        self.readings: list[GatewayReading] = []
        self.was_stopped = False

    async def run(self, stop: asyncio.Event) -> None:
        """Raises: `ConfigError`."""
        num_intervals = max(1, min(NUM_INTERVALS, int(self._window_s / LEAST_INTERVAL_S)))
        headers = bearer_headers(environment.api_key())
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=READ_TIMEOUT_S)) as session:
            self.readings.append(await self._read(session, headers))
            say(f"reading the load of {self._url} for {self._window_s:g} s")
            start_s = self.readings[0].instant_s
            for index in range(1, num_intervals + 1):
                due_s = start_s + self._window_s * index / num_intervals
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(stop.wait(), max(0.0, due_s - time.monotonic()))
                self.readings.append(await self._read(session, headers))
                if stop.is_set():
                    break
        self.was_stopped = stop.is_set()

    async def _read(self, session: aiohttp.ClientSession, headers: Mapping[str, str]) -> GatewayReading:
        try:
            async with session.get(f"{self._url}/metrics", headers=headers) as response:
                status, text = response.status, await response.text()
        except (aiohttp.ClientError, UnicodeDecodeError, TimeoutError) as error:
            reason = str(error) or type(error).__name__
            raise ConfigError(f"nothing can be read from {self._url}/metrics: {reason}; is it the gateway?") from error
        if status in (401, 403):
            raise ConfigError(f"{self._url} refuses our key ({status}); set PDSERVE_API_KEY to one that it takes")
        if status != 200:
            raise ConfigError(f"{self._url}/metrics answers {status}; give the URL of a pdserve gateway, without /v1")
        try:
            return read_exposition(text, instant_s=time.monotonic())
        except ConfigError as error:
            raise ConfigError(f"{self._url}/metrics: {error.message}; give the URL of a pdserve gateway") from error
