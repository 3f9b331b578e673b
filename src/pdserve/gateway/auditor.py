"""Looks whether a gateway leaks when it is idle, and shows its ledger to who asks."""

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Iterable

import msgspec
from aiohttp import web

from pdserve.clock import Clock
from pdserve.errors import AuthenticationError
from pdserve.gateway.hub import Hub
from pdserve.gateway.ledger import GatewayLeak, GatewayLeakKind, GatewayLedger, audit, ledger_of, log_lines
from pdserve.telemetry.gateway_metrics import GatewayMetrics
from pdserve.wire.bearer import authorised

AUDIT_EVERY_S = 2.0
"""At idle."""

MAX_LOGGED = 20
"""Of the leaks that one audit finds."""

_log = logging.getLogger(__name__)


class Auditor:
    """Threads: the event loop's only. Lifetime: `start` to `stop` of the application."""

    def __init__(self, hub: Hub, metrics: GatewayMetrics, clock: Clock, *, secret: str | None) -> None:
        """`secret` is the cluster's: who has a key for answers need not see whose else there are."""
        self._hub = hub
        self._metrics = metrics
        self._clock = clock
        self._secret = secret
        self._known: frozenset[GatewayLeak] = frozenset()
        """Those that were logged."""
        self._running: asyncio.Task[None] | None = None
        self._count(())

    def start(self) -> None:
        self._running = asyncio.create_task(self._run(), name="gateway auditor")

    async def stop(self) -> None:
        if self._running is not None:
            self._running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._running

    def audit(self) -> None:
        """Count what leaked; log it as an error, once."""
        leaks = frozenset(audit(self._hub))
        self._count(leaks)
        new = sorted(leaks - self._known, key=lambda leak: (leak.work_id, leak.kind.value))
        for leak in new[:MAX_LOGGED]:
            _log.error("ledger_leaked kind=%s work_id=%s what=%r", leak.kind.value, leak.work_id, leak.message)
        if len(new) > MAX_LOGGED:
            _log.error("ledger_leaked num_more=%d", len(new) - MAX_LOGGED)
        self._known = leaks

    def ledger(self) -> GatewayLedger:
        """With an audit."""
        self.audit()
        return ledger_of(self._hub, now_ns=self._clock.now_ns())

    def dump(self) -> None:
        """The ledger to the log, at a level that is not filtered by default: somebody asked for it."""
        for line in log_lines(self.ledger()):
            _log.warning("%s", line)

    async def show(self, request: web.Request) -> web.Response:
        """`GET /debug/ledger`. Raises: `AuthenticationError`."""
        if not authorised(request, self._secret):
            raise AuthenticationError("the cluster secret is missing or wrong; set PDSERVE_CLUSTER_SECRET")
        return web.Response(body=msgspec.json.encode(self.ledger()), content_type="application/json")

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(AUDIT_EVERY_S)
            try:
                if not self._hub.open_requests:
                    self.audit()
            except Exception:
                _log.exception("audit_failed")

    def _count(self, leaks: Iterable[GatewayLeak]) -> None:
        counts = Counter(leak.kind for leak in leaks)
        self._metrics.set_leaked({kind.value: counts[kind] for kind in GatewayLeakKind})
