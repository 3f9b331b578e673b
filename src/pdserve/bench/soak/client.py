"""Sends one request to the gateway as a client of some manner would, and brings back what it got."""

import asyncio
import json
import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from io import BytesIO
from typing import Any

import aiohttp

from pdserve.bench.semantics.case import Case
from pdserve.bench.soak.judgement import Cut, Received
from pdserve.bench.soak.mix import Manner
from pdserve.wire.bearer import bearer_headers

SLOW_READ_BYTES = 256
SLOW_READ_EVERY_S = 0.02
"""At 12,800 bytes a second, some 20 tokens with their logprobs: about as fast as they are generated."""

_SLOW_WINDOW_BYTES = 4096


class Client:
    """Lifetime: of its two sessions, see `clients_of`."""

    def __init__(self, url: str, session: aiohttp.ClientSession, slow_session: aiohttp.ClientSession) -> None:
        self._url = url
        self._session = session
        self._slow_session = slow_session

    async def send(self, case: Case, *, manner: Manner, leave_after_s: float, deadline_s: float) -> Received:
        """Returns after `deadline_s` at the latest. `leave_after_s` is for clients that leave."""
        leaves = manner is Manner.LEAVES
        reading = _Reading()
        try:
            async with asyncio.timeout(min(leave_after_s, deadline_s) if leaves else deadline_s):
                await self._read(case, reading, slowly=manner is Manner.READS_SLOWLY)
        except TimeoutError:
            return reading.received(Cut.LEFT if leaves else Cut.DEADLINE)
        except (aiohttp.ClientError, ConnectionError) as error:
            return reading.received(Cut.CONNECTION, note=f"{type(error).__name__}: {error}")
        return reading.received()

    async def _read(self, case: Case, reading: "_Reading", *, slowly: bool) -> None:
        session = self._slow_session if slowly else self._session
        method = "GET" if case.body is None else "POST"
        async with session.request(method, self._url + case.path, data=_data(case)) as response:
            reading.response = response
            if not slowly:
                async for chunk in response.content.iter_any():
                    reading.read += chunk
                return
            while chunk := await response.content.read(SLOW_READ_BYTES):
                reading.read += chunk
                await asyncio.sleep(SLOW_READ_EVERY_S)


def _data(case: Case) -> BytesIO | None:
    """As a file: aiohttp warns of bytes over a MiB."""
    body = json.dumps(case.body).encode() if isinstance(case.body, dict) else case.body
    return None if body is None else BytesIO(body)


class _Reading:
    """What has come so far, also when the reader is interrupted."""

    def __init__(self) -> None:
        self.response: aiohttp.ClientResponse | None = None
        self.read = bytearray()

    def received(self, cut: Cut | None = None, *, note: str = "") -> Received:
        if self.response is None:
            return Received(cut=cut, note=note)
        return Received(
            status=self.response.status,
            is_stream=self.response.content_type == "text/event-stream",
            text=self.read.decode(errors="ignore" if cut is Cut.LEFT else "strict"),
            cut=cut,
            note=note,
        )


@asynccontextmanager
async def client_of(url: str, *, api_key: str | None) -> AsyncGenerator[Client]:
    """Its connections are closed at the end."""
    headers = {"Content-Type": "application/json", **bearer_headers(api_key)}
    unlimited = aiohttp.ClientTimeout(total=None)
    slow_connector = aiohttp.TCPConnector(limit=0, force_close=True, socket_factory=_slow_socket)
    async with (
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), headers=headers, timeout=unlimited) as session,
        aiohttp.ClientSession(
            connector=slow_connector, headers=headers, timeout=unlimited, read_bufsize=SLOW_READ_BYTES
        ) as slow_session,
    ):
        yield Client(url, session, slow_session)


def _slow_socket(address: tuple[Any, ...]) -> socket.socket:
    """Whose kernel takes little in advance."""
    family, kind, protocol = address[:3]
    slow = socket.socket(family, kind, protocol)
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SLOW_WINDOW_BYTES)
    return slow
