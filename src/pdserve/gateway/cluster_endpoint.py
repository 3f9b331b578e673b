"""`GET /cluster`: where workers join."""

from aiohttp import web

from pdserve.gateway.hub import Hub
from pdserve.wire.acceptor import Acceptor
from pdserve.wire.codec import gateway_codec

MAX_CONNECTIONS = 1024
"""Of workers, those that have not joined yet included (H6): four times as many as may join by default."""


class ClusterEndpoint:
    def __init__(self, hub: Hub, *, secret: str | None) -> None:
        """`secret` is the cluster's; None: anybody may join."""
        self._hub = hub
        self._acceptor = Acceptor(gateway_codec(), secret=secret, max_connections=MAX_CONNECTIONS)

    async def join(self, request: web.Request) -> web.StreamResponse:
        """As long as the worker's connection lasts. Raises: `web.HTTPException`."""
        return await self._acceptor.accept(request, self._hub.serve_worker)
