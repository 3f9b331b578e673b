"""The audit of a gateway finds what no client's request owns."""

# pyright: reportPrivateUsage=false

import logging
from pathlib import Path

import pytest
from tests.pure.dispatcher_side import join_of, work_of

from pdserve.clock import VirtualClock
from pdserve.cluster.registry import Refused
from pdserve.gateway.auditor import Auditor
from pdserve.gateway.hub import Hub
from pdserve.gateway.ledger import GatewayLeak, GatewayLeakKind, audit, ledger_of, log_lines
from pdserve.gateway.request_record import RequestRecord
from pdserve.gateway.request_scope import request_scope
from pdserve.gateway.settings import GatewaySettings
from pdserve.ids import RequestId
from pdserve.telemetry.gateway_metrics import GatewayMetrics
from pdserve.units import NS_PER_S

CLIENTS = RequestId("cmpl-1")


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def hub(clock: VirtualClock) -> Hub:
    """With one decode worker."""
    hub = Hub(GatewaySettings(model_name="m", model_dir=Path("/nowhere")), GatewayMetrics(model_name="m"), clock)
    assert not isinstance(hub._registry.join(join_of("a", 1), 0), Refused)
    return hub


def record_of(hub: Hub, clock: VirtualClock) -> RequestRecord:
    return RequestRecord(hub._metrics, clock)


def test_ledger_of_a_request_names_its_works_and_ages(hub: Hub, clock: VirtualClock) -> None:
    with request_scope(CLIENTS, record_of(hub, clock), hub) as works:
        works.submit(work_of("cmpl-1-0"))
        works.submit(work_of("cmpl-1-1"))
        clock.advance_ns(2 * NS_PER_S)
        ledger = ledger_of(hub, now_ns=clock.now_ns())
        (request,) = ledger.requests
        assert (request.request_id, request.phase, request.age_s) == (CLIENTS, "reading", 2.0)
        assert [(work.work_id, work.worker_id) for work in request.works] == [("cmpl-1-0", "a"), ("cmpl-1-1", "a")]
        assert ledger.leaks == ()
        assert [line.split()[0] for line in log_lines(ledger)] == [
            "ledger_request",
            "ledger_work",
            "ledger_work",
            "ledger_lease",
        ]
    after = ledger_of(hub, now_ns=clock.now_ns())
    assert (after.requests, after.leaks) == ((), ())


def test_audit_of_works_that_were_not_released_names_request_and_stream(hub: Hub) -> None:
    hub.submit(work_of("lost"))
    leaks = audit(hub)
    assert [(leak.kind, leak.work_id) for leak in leaks] == [
        (GatewayLeakKind.REQUESTS, "lost"),
        (GatewayLeakKind.STREAMS, "lost"),
    ]
    hub.release(RequestId("lost"))
    assert audit(hub) == []


def test_audit_of_a_stream_that_outlives_its_request_names_it(hub: Hub) -> None:
    hub.submit(work_of("lost"))
    hub._dispatcher.shut_down()
    assert [(leak.kind, leak.work_id) for leak in audit(hub)] == [(GatewayLeakKind.STREAMS, "lost")]


def test_audit_of_a_pending_request_without_stream_names_it(hub: Hub, clock: VirtualClock) -> None:
    with request_scope(CLIENTS, record_of(hub, clock), hub) as works:
        works.submit(work_of("cmpl-1"))
        del hub._streams[RequestId("cmpl-1")]
        message = "a worker has it, and no stream takes what it answers"
        assert audit(hub) == [GatewayLeak(kind=GatewayLeakKind.REQUESTS, work_id="cmpl-1", message=message)]


def test_auditor_of_a_gateway_logs_a_leak_once(hub: Hub, clock: VirtualClock, caplog: pytest.LogCaptureFixture) -> None:
    auditor = Auditor(hub, hub._metrics, clock, secret=None)
    hub.submit(work_of("lost"))
    with caplog.at_level(logging.ERROR):
        auditor.audit()
        auditor.audit()
    assert [record.getMessage().split()[1] for record in caplog.records] == ["kind=requests", "kind=streams"]
    values = [
        sample.value
        for family in hub._metrics.registry.collect()
        for sample in family.samples
        if sample.name == "pdserve:ledger_leaked"
    ]
    assert values == [1.0, 1.0]
