"""A gateway that listens, until it is told to stop."""

import asyncio
import logging
import os
import signal
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import replace

from aiohttp import web

from pdserve.errors import ConfigError
from pdserve.gateway.app import AUDITOR, METRICS, build_app
from pdserve.gateway.drain import Drain
from pdserve.gateway.settings import GatewaySettings
from pdserve.telemetry.gateway_metrics import GatewayMetrics
from pdserve.text.tokenizer import Tokenizer
from pdserve.wire.acceptor import Credential
from pdserve.wire.connection_places import ConnectionPlaces, afford_connections
from pdserve.wire.http_listener import KEEPALIVE_TIMEOUT_S, listening
from pdserve.wire.tls_listener import listening_in_tls

SHUTDOWN_TIMEOUT_S = 5.0
"""For handlers to write their last answers after the hub has failed what was pending."""

_log = logging.getLogger(__name__)


async def run_gateway(settings: GatewaySettings, stop: asyncio.Event, ready: Callable[[], None]) -> None:
    """Serve until `stop` is set, and then drain; `ready` is called once the port listens.

    Raises: `ConfigError` when the model directory has no tokenizer or the address can't be listened on.
    """
    tokenizer = await asyncio.to_thread(Tokenizer.load, settings.model_dir)
    settings = replace(settings, max_connections=afford_connections(settings.max_connections))
    drain = Drain()
    app = build_app(settings, tokenizer, drain=drain)
    runner = web.AppRunner(
        app,
        handler_cancellation=True,
        shutdown_timeout=SHUTDOWN_TIMEOUT_S,
        keepalive_timeout=KEEPALIVE_TIMEOUT_S,
        access_log=None,
    )
    await runner.setup()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGUSR1, app[AUDITOR].dump)
    try:
        async with AsyncExitStack() as listeners:
            await _listen(runner, settings, app[METRICS], listeners)
            _log.info("gateway_listening host=%s port=%d model=%s", settings.host, settings.port, settings.model_name)
            ready()
            await stop.wait()
            await _finish(drain, timeout_s=settings.drain_timeout_s)
    finally:
        loop.remove_signal_handler(signal.SIGUSR1)
        await runner.cleanup()


async def _listen(
    runner: web.AppRunner, settings: GatewaySettings, metrics: GatewayMetrics, listeners: AsyncExitStack
) -> None:
    """To clients, and to workers in TLS where that is asked for. Raises: `ConfigError`."""
    host, port, flag = settings.host, settings.port, "--port"
    try:
        places = ConnectionPlaces(
            max_connections=settings.max_connections,
            on_ended=lambda ending: metrics.connections.observe(ending.value),
        )
        await listeners.enter_async_context(
            listening(runner, host, port, places, tls=settings.api_tls, head_timeout_s=settings.head_timeout_s)
        )
        if settings.tls is not None:
            port, flag = settings.control_port, "--control-port"
            listener = listening_in_tls(
                runner,
                host,
                port,
                settings.tls.listener,
                on_refused=lambda: metrics.observe_authentication_refused(Credential.CERTIFICATE.value),
            )
            await listeners.enter_async_context(listener)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"can't listen on {host}:{port}: {_reason(error)}; choose another --host or {flag}"
        ) from error


async def _finish(drain: Drain, *, timeout_s: float) -> None:
    """Until no request runs, or the time is over."""
    _log.info("drain_started num_running=%d timeout_s=%g", drain.num_running, timeout_s)
    try:
        await drain.run(timeout_s=timeout_s)
    except TimeoutError:
        _log.warning("drain_cut num_running=%d timeout_s=%g", drain.num_running, timeout_s)


def _reason(error: OSError | OverflowError) -> str:
    """Without the address, which asyncio's own message repeats; name resolution has negative numbers of its own."""
    if isinstance(error, OSError) and error.errno is not None and error.errno > 0:
        return os.strerror(error.errno)
    return str(error)
