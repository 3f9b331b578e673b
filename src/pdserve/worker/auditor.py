"""Looks whether a worker leaks when it is idle, and shows its ledger to who asks."""

import asyncio
import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from pdserve.clock import Clock
from pdserve.ids import Incarnation
from pdserve.telemetry.worker_metrics import WorkerMetrics
from pdserve.worker.audit import Leak, LeakKind, audit
from pdserve.worker.core import WorkerCore
from pdserve.worker.ledger import WorkerLedger, ledger_of, log_lines

AUDIT_EVERY_S = 2.0
"""At idle. An audit of 100,000 pages takes about 14 ms, in which the event loop stands still."""

MAX_LOGGED = 20
"""Of the leaks that one audit finds: a handoff may have hundreds of pages."""

_log = logging.getLogger(__name__)


class Auditor:
    """Threads: the event loop's only, so that it runs between two events of the core."""

    def __init__(
        self,
        *,
        core: WorkerCore,
        clock: Clock,
        metrics: WorkerMetrics,
        connected_since_ns: Mapping[Incarnation, int] = MappingProxyType({}),
    ) -> None:
        """`connected_since_ns` is looked at whenever a ledger is taken."""
        self._connected_since_ns = connected_since_ns
        self._core = core
        self._clock = clock
        self._metrics = metrics
        self._known: frozenset[Leak] = frozenset()
        """Those that were logged."""
        self._count(())

    async def run(self) -> None:
        """Audit whenever the worker is idle."""
        while True:
            await asyncio.sleep(AUDIT_EVERY_S)
            try:
                if self._core.num_open == 0:
                    self.audit()
            except Exception:
                _log.exception("audit_failed")

    def audit(self) -> None:
        """Count what leaked; log it as an error, once."""
        leaks = frozenset(audit(self._core))
        self._count(leaks)
        new = sorted(leaks - self._known, key=lambda leak: leak.message)
        for leak in new[:MAX_LOGGED]:
            _log.error("ledger_leaked kind=%s dp_rank=%s what=%r", leak.kind.value, leak.dp_rank, leak.message)
        if len(new) > MAX_LOGGED:
            _log.error("ledger_leaked num_more=%d", len(new) - MAX_LOGGED)
        self._known = leaks

    def ledger(self) -> WorkerLedger:
        """With an audit."""
        self.audit()
        return ledger_of(self._core, now_ns=self._clock.now_ns(), connected_since_ns=self._connected_since_ns)

    def dump(self) -> None:
        """The ledger to the log, at a level that is not filtered by default: somebody asked for it."""
        for line in log_lines(self.ledger()):
            _log.warning("%s", line)

    def _count(self, leaks: Iterable[Leak]) -> None:
        counts = Counter(leak.kind for leak in leaks)
        self._metrics.set_leaked({kind.value: counts[kind] for kind in LeakKind})
