"""The worker's HTTP endpoints, for operators and for peers."""

import msgspec
from aiohttp import web

from pdserve.config.worker import WorkerSettings
from pdserve.errors import ConfigError
from pdserve.ids import RequestId
from pdserve.telemetry.trace import TraceBook
from pdserve.telemetry.worker_metrics import WorkerMetrics
from pdserve.wire.bearer import authorised
from pdserve.worker.auditor import Auditor
from pdserve.worker.captures import Captures
from pdserve.worker.driver import Driver
from pdserve.worker.stop_at import StopAt


class Endpoints:
    """`/live` and `/ready` are open; everything else asks for the cluster secret where one is set."""

    def __init__(
        self,
        *,
        settings: WorkerSettings,
        driver: Driver,
        metrics: WorkerMetrics,
        traces: TraceBook,
        captures: Captures | None,
        auditor: Auditor,
        stop_at: StopAt | None,
    ) -> None:
        self._settings = settings
        self._driver = driver
        self._metrics = metrics
        self._traces = traces
        self._captures = captures
        self._auditor = auditor
        self._stop_at = stop_at
        self.is_ready = False

    def routes(self) -> list[web.RouteDef]:
        routes = [
            web.get("/live", self._live),
            web.get("/ready", self._ready),
            web.get("/metrics", self._metrics_text),
            web.get("/debug/ledger", self._ledger),
            web.get("/debug/trace/{request_id}", self._trace),
        ]
        if self._captures is not None:
            routes.append(web.get("/debug/kv/{request_id}", self._kv))
        if self._stop_at is not None:
            routes.append(web.put("/debug/stop-at/{state}", self._arm_stop))
            routes.append(web.delete("/debug/stop-at", self._disarm_stop))
        return routes

    async def _live(self, request: web.Request) -> web.Response:
        return web.Response(text="live\n")

    async def _ready(self, request: web.Request) -> web.Response:
        if not self.is_ready:
            return web.Response(status=503, text="not joined to a gateway\n")
        if self._driver.core.is_draining:
            return web.Response(status=503, text="draining\n")
        return web.Response(text="ready\n")

    async def _metrics_text(self, request: web.Request) -> web.Response:
        self._require_secret(request)
        self._driver.refresh_metrics()
        return web.Response(body=self._metrics.exposition(), headers={"Content-Type": "text/plain; version=0.0.4"})

    async def _ledger(self, request: web.Request) -> web.Response:
        self._require_secret(request)
        return web.Response(body=msgspec.json.encode(self._auditor.ledger()), content_type="application/json")

    async def _trace(self, request: web.Request) -> web.Response:
        self._require_secret(request)
        spans = self._traces.get(RequestId(request.match_info["request_id"]))
        return web.Response(body=msgspec.json.encode(spans), content_type="application/json")

    async def _kv(self, request: web.Request) -> web.Response:
        """The captured KV of a prompt, a `KvSnapshot` in msgpack; 404 when it was not captured."""
        self._require_secret(request)
        request_id = RequestId(request.match_info["request_id"])
        captured = self._captures.get(request_id) if self._captures is not None else None
        if captured is None:
            raise web.HTTPNotFound(text=f"no KV of {request_id} was captured\n")
        return web.Response(body=msgspec.msgpack.encode(captured), content_type="application/msgpack")

    async def _arm_stop(self, request: web.Request) -> web.Response:
        """Stop this process at a state; 400 for one that its side of a handoff does not have."""
        self._require_secret(request)
        try:
            if self._stop_at is not None:
                self._stop_at.arm(request.match_info["state"])
        except ConfigError as error:
            raise web.HTTPBadRequest(text=f"{error.message}\n") from error
        return web.Response(text="armed\n")

    async def _disarm_stop(self, request: web.Request) -> web.Response:
        self._require_secret(request)
        if self._stop_at is not None:
            self._stop_at.disarm()
        return web.Response(text="disarmed\n")

    def _require_secret(self, request: web.Request) -> None:
        if not authorised(request, self._settings.secret):
            raise web.HTTPUnauthorized(text="the cluster secret is missing or wrong; set PDSERVE_CLUSTER_SECRET\n")
