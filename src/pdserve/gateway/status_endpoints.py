"""What operators, probes and dashboards ask: health, models, workers, metrics, version."""

import importlib.metadata
import time

import msgspec
from aiohttp import web

from pdserve.clock import Clock
from pdserve.config.role import Role
from pdserve.gateway.drain import Drain
from pdserve.gateway.hub import Hub
from pdserve.gateway.openapi import openapi_document
from pdserve.gateway.served_model import DEFAULT_MODEL, ServedModel
from pdserve.telemetry.gateway_metrics import GatewayMetrics
from pdserve.units import ns_to_seconds
from pdserve.wire.peer import PROTOCOL_VERSION


class WorkerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One worker in the answer of `GET /workers`."""

    worker_id: str
    role: Role
    url: str
    incarnation: str
    """A string, for JSON readers that hold numbers in 53 bits."""
    max_model_len: int
    joined_s_ago: float
    lease_left_s: float
    tensor_parallel_size: int
    num_prefill_peers: int
    """Prefill workers that it is connected to; 0 where it needs none."""
    draining: bool
    """It finishes what it has, is given nothing new, and will leave."""
    ranks: list[dict[str, int]]
    """Of each data parallel rank, its number and its load."""


class StatusEndpoints:
    def __init__(self, hub: Hub, metrics: GatewayMetrics, clock: Clock, model: ServedModel, drain: Drain) -> None:
        self._hub = hub
        self._metrics = metrics
        self._clock = clock
        self._served = model
        self._drain = drain
        self._model_names = (model.name, DEFAULT_MODEL)
        self._created_s = int(time.time())

    async def live(self, request: web.Request) -> web.Response:
        """200 while the process answers at all."""
        return _json({"status": "ok"})

    async def ready(self, request: web.Request) -> web.Response:
        """200 when a request can be taken: this gateway does not drain, and a decode worker is there that does not."""
        num_decode = sum(1 for _ in self._hub.view.decoding())
        num_prefill = sum(1 for _ in self._hub.view.taking_grants())
        obstacle = None if num_decode else self._hub.no_worker.message
        if self._drain.has_begun:
            obstacle = "draining"
        return _json(
            {"status": obstacle or "ok", "num_decode_workers": num_decode, "num_prefill_workers": num_prefill},
            status=503 if obstacle else 200,
        )

    async def models(self, request: web.Request) -> web.Response:
        return _json({"object": "list", "data": [self._model(name) for name in self._model_names]})

    async def model(self, request: web.Request) -> web.Response:
        """Raises: `ModelNotFound`."""
        name = request.match_info["name"]
        self._served.require_named(name)
        return _json(self._model(name))

    async def workers(self, request: web.Request) -> web.Response:
        now_ns = self._clock.now_ns()
        statuses = [
            WorkerStatus(
                worker_id=worker.worker_id,
                role=worker.role,
                url=worker.url,
                incarnation=str(worker.incarnation),
                max_model_len=worker.max_model_len,
                joined_s_ago=ns_to_seconds(now_ns - worker.joined_ns),
                lease_left_s=ns_to_seconds(worker.lease_deadline_ns - now_ns),
                tensor_parallel_size=worker.tensor_parallel_size,
                num_prefill_peers=worker.num_prefill_peers,
                draining=worker.draining,
                ranks=[{"dp_rank": rank.dp_rank, **msgspec.structs.asdict(rank.load)} for rank in worker.ranks],
            )
            for worker in self._hub.view.workers
        ]
        return _json({"model_fingerprint": self._hub.fingerprint, "workers": statuses})

    async def metrics(self, request: web.Request) -> web.Response:
        self._hub.refresh_metrics()
        return web.Response(
            body=self._metrics.exposition(), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        )

    async def openapi(self, request: web.Request) -> web.Response:
        return _json(openapi_document(version=_package_version(), model_names=self._model_names))

    async def version(self, request: web.Request) -> web.Response:
        return _json({"version": _package_version(), "protocol_version": PROTOCOL_VERSION})

    def _model(self, name: str) -> dict[str, object]:
        return {
            "id": name,
            "object": "model",
            "created": self._created_s,
            "owned_by": "pdserve",
            "root": self._served.name,
            "max_model_len": self._hub.max_model_len,
        }


def _json(content: object, *, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(content), status=status, content_type="application/json")


def _package_version() -> str:
    try:
        return importlib.metadata.version("pdserve")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
