"""The aiohttp application: routes, and what surrounds every handler."""

import logging

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from pdserve.clock import Clock, SystemClock
from pdserve.errors import AuthenticationError, PdserveError
from pdserve.gateway.auditor import Auditor
from pdserve.gateway.cluster_endpoint import ClusterEndpoint
from pdserve.gateway.completion_endpoints import CompletionEndpoints
from pdserve.gateway.drain import Drain, admit_requests
from pdserve.gateway.errors import failure_of, failure_of_http
from pdserve.gateway.failures import BUG, RequestFailed
from pdserve.gateway.hub import Hub
from pdserve.gateway.request_body import RequestBodies
from pdserve.gateway.responses_endpoints import ResponsesEndpoints
from pdserve.gateway.served_model import ServedModel
from pdserve.gateway.settings import GatewaySettings
from pdserve.gateway.status_endpoints import StatusEndpoints
from pdserve.gateway.token_endpoints import TokenEndpoints
from pdserve.gateway.tokenizer import GatewayTokenizer
from pdserve.telemetry.gateway_metrics import GatewayMetrics
from pdserve.wire.bearer import authorised
from pdserve.wire.http_listener import count_requests

GUARDED = ("/v1/", "/tokenize", "/detokenize")
"""How the paths begin that ask for the API key."""

AUDITOR = web.AppKey("auditor", Auditor)
"""Of the application, for who wants its ledger without asking over HTTP."""

METRICS = web.AppKey("metrics", GatewayMetrics)
"""Of the application, for what is refused before a request is read."""

_log = logging.getLogger(__name__)


def build_app(
    settings: GatewaySettings, tokenizer: GatewayTokenizer, *, clock: Clock | None = None, drain: Drain | None = None
) -> web.Application:
    """A gateway without its socket; `drain` is how it is stopped in good order.

    Requires: it is served with `handler_cancellation`, which is how a client that leaves is noticed.
    """
    clock, drain = clock or SystemClock(), drain or Drain()
    metrics = GatewayMetrics(model_name=settings.model_name)
    hub = Hub(settings, metrics, clock)
    model = ServedModel(
        tokenizer,
        name=settings.model_name,
        tool_parser=settings.tool_parser,
        reasoning_parser=settings.reasoning_parser,
    )
    bodies = RequestBodies(
        timeout_s=settings.body_timeout_s,
        max_body_bytes=settings.max_body_bytes,
        max_bytes=settings.max_bodies_bytes,
    )
    completions = CompletionEndpoints(settings, bodies, model, hub, metrics, clock)
    responses = ResponsesEndpoints(settings, bodies, model, hub, metrics, clock)
    tokens = TokenEndpoints(bodies, model, hub)
    status = StatusEndpoints(hub, metrics, clock, model, drain)
    cluster = ClusterEndpoint(hub, settings, metrics)
    auditor = Auditor(hub, metrics, clock, secret=settings.cluster_secret)

    async def start(app: web.Application) -> None:
        hub.start()
        auditor.start()

    async def stop(app: web.Application) -> None:
        await auditor.stop()
        await hub.stop()

    admit = admit_requests(drain, max_posted=settings.max_posted)
    app = web.Application(
        middlewares=[count_requests, _openai_errors, _require_key(settings.api_key, metrics), admit],
    )
    app.add_routes(_generating_routes(completions, responses))
    app.add_routes(_other_routes(tokens, status, cluster, auditor))
    app[AUDITOR] = auditor
    app[METRICS] = metrics
    app.on_startup.append(start)
    app.on_shutdown.append(stop)
    return app


def _generating_routes(completions: CompletionEndpoints, responses: ResponsesEndpoints) -> list[web.RouteDef]:
    return [
        web.post("/v1/chat/completions", completions.chat),
        web.post("/v1/completions", completions.completion),
        web.post("/v1/responses", responses.create),
    ]


def _other_routes(
    tokens: TokenEndpoints, status: StatusEndpoints, cluster: ClusterEndpoint, auditor: Auditor
) -> list[web.RouteDef]:
    return [
        web.post("/tokenize", tokens.tokenize),
        web.post("/detokenize", tokens.detokenize),
        web.get("/v1/models", status.models),
        web.get("/v1/models/{name:.+}", status.model),
        web.get("/health", status.ready),
        web.get("/ready", status.ready),
        web.get("/live", status.live),
        web.get("/metrics", status.metrics),
        web.get("/version", status.version),
        web.get("/openapi.json", status.openapi),
        web.get("/workers", status.workers),
        web.get("/cluster", cluster.join),
        web.get("/debug/ledger", auditor.show),
    ]


@web.middleware
async def _openai_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Whatever a handler raises becomes an OpenAI error body with its status (rule H9)."""
    try:
        return await handler(request)
    except RequestFailed as error:
        failure = error.failure
    except PdserveError as error:
        failure = failure_of(error)
    except web.HTTPException as error:
        failure = failure_of_http(error)
    except ConnectionError:
        raise
    except Exception:
        _log.exception("handler_failed path=%s", request.path)
        failure = BUG
    return web.Response(
        body=msgspec.json.encode(failure.body),
        status=failure.status,
        content_type="application/json",
        headers=failure.headers,
    )


def _require_key(api_key: str | None, metrics: GatewayMetrics) -> Middleware:
    @web.middleware
    async def require_key(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path.startswith(GUARDED) and not authorised(request, api_key):
            metrics.observe_authentication_refused("api_key")
            raise AuthenticationError("the API key is missing or wrong; send it as 'Authorization: Bearer KEY'")
        return await handler(request)

    return require_key
