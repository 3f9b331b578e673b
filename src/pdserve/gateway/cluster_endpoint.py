"""`GET /cluster`: where workers join."""

from aiohttp import web

from pdserve.gateway.hub import Hub
from pdserve.gateway.settings import GatewaySettings
from pdserve.telemetry.gateway_metrics import GatewayMetrics
from pdserve.wire.acceptor import Acceptor
from pdserve.wire.codec import gateway_codec

MAX_CONNECTIONS = 1024
"""Of workers, those that have not joined yet included (H6): four times as many as may join by default."""


class ClusterEndpoint:
    def __init__(self, hub: Hub, settings: GatewaySettings, metrics: GatewayMetrics) -> None:
        self._hub = hub
        self._acceptor = Acceptor(
            gateway_codec(),
            secret=settings.cluster_secret,
            max_connections=MAX_CONNECTIONS,
            needs_tls=settings.tls is not None,
            on_refused=lambda credential: metrics.observe_authentication_refused(credential.value),
        )

    async def join(self, request: web.Request) -> web.StreamResponse:
        """As long as the worker's connection lasts. Raises: `web.HTTPException`."""
        return await self._acceptor.accept(request, self._hub.serve_worker)
