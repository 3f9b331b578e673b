"""`GET /cluster`: where workers join."""

from aiohttp import web

from pdserve.errors import AuthenticationError
from pdserve.gateway.hub import Hub
from pdserve.wire.channel import accept, authorised
from pdserve.wire.codec import gateway_codec


class ClusterEndpoint:
    def __init__(self, hub: Hub, *, secret: str | None) -> None:
        """`secret` is the cluster's; None: anybody may join."""
        self._hub = hub
        self._secret = secret

    async def join(self, request: web.Request) -> web.StreamResponse:
        """As long as the worker's connection lasts. Raises: `AuthenticationError`."""
        if not authorised(request, self._secret):
            raise AuthenticationError("the cluster secret is missing or wrong")
        channel = await accept(request, gateway_codec())
        try:
            await self._hub.serve_worker(channel)
        finally:
            await channel.close()
        return channel.response
