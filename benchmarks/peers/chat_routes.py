"""Ways from the client to the servers: to one gateway, to one of several servers, or to two in turn.

vLLM comes without a gateway. The client does what one would do, and so costs its arms no process more.
"""

from collections.abc import Sequence
from typing import Any

import aiohttp
import msgspec

from pdserve.bench.api_client import COMPLETIONS_PATH, Answer, ApiClient
from pdserve.errors import PdserveError

PREFILL_ONLY: dict[str, object] = {"do_remote_decode": True, "do_remote_prefill": False}
"""What vLLM's connector is told with a prompt whose KV another server will fetch."""


class SpreadRoute:
    """Each request to the server that has the fewest of ours; among equals in turn."""

    def __init__(self, session: aiohttp.ClientSession, urls: Sequence[str]) -> None:
        self._clients = [ApiClient(session, url) for url in urls]
        self._num_running = [0] * len(urls)
        self._last = -1

    async def stream(self, body: dict[str, object], answer: Answer) -> None:
        index = self._next()
        self._num_running[index] += 1
        try:
            await self._clients[index].stream(COMPLETIONS_PATH, msgspec.json.encode(body), answer)
        finally:
            self._num_running[index] -= 1

    def _next(self) -> int:
        count = len(self._clients)
        in_turn = [(self._last + 1 + offset) % count for offset in range(count)]
        self._last = min(in_turn, key=lambda index: self._num_running[index])
        return self._last


class PullRoute:
    """The prompt to a prefill server, which answers where its KV lies, then to a decode server, which fetches it."""

    def __init__(self, session: aiohttp.ClientSession, *, prefill_url: str, decode_url: str) -> None:
        self._session = session
        self._prefill_url = prefill_url
        self._decode = ApiClient(session, decode_url)

    async def stream(self, body: dict[str, object], answer: Answer) -> None:
        place = await self._prefill({**body, "max_tokens": 1, "stream": False, "kv_transfer_params": PREFILL_ONLY})
        await self._decode.stream(COMPLETIONS_PATH, msgspec.json.encode({**body, "kv_transfer_params": place}), answer)

    async def _prefill(self, body: dict[str, object]) -> dict[str, Any]:
        """Raises: `PdserveError`."""
        try:
            async with self._session.post(self._prefill_url + COMPLETIONS_PATH, json=body) as response:
                text = await response.text()
        except aiohttp.ClientError as error:
            raise PdserveError(f"can't reach {self._prefill_url}: {error}") from error
        try:
            place = msgspec.json.decode(text)["kv_transfer_params"]
        except (msgspec.DecodeError, KeyError, TypeError):
            place = None
        if response.status != 200 or not place:
            raise PdserveError(f"the prefill server answered {response.status} without a place: {text[:300]}")
        return place
