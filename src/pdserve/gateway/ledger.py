"""Every request, stream and lease of a gateway, with owner, phase and age: `GET /debug/ledger`.

What a worker was given belongs to the client's request whose handler waits for it. A work that is pending, or a stream,
whose client's request is over leaked (rule H7); so did a work that is pending without a stream: nobody hears of it.
"""

from collections.abc import Iterator
from enum import Enum

import msgspec

from pdserve.gateway.hub import Hub
from pdserve.gateway.open_requests import OpenRequest
from pdserve.ids import RequestId
from pdserve.units import ns_to_seconds


class GatewayLeakKind(Enum):
    REQUESTS = "requests"
    STREAMS = "streams"


class WorkEntry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The answer to one prompt of a client's request."""

    work_id: str
    worker_id: str | None = None
    """Who has it now; nobody once it has ended."""
    dp_rank: int | None = None
    attempt_id: str | None = None
    """What it is called there."""
    num_buffered_deltas: int = 0
    """That came from the worker, and that the client has not taken."""


class RequestEntry(msgspec.Struct, frozen=True, kw_only=True):
    request_id: str
    phase: str
    age_s: float
    works: tuple[WorkEntry, ...]


class LeaseEntry(msgspec.Struct, frozen=True, kw_only=True):
    worker_id: str
    incarnation: str
    """A string, for JSON readers that hold numbers in 53 bits."""
    role: str
    age_s: float
    lease_left_s: float


class GatewayLeak(msgspec.Struct, frozen=True, kw_only=True):
    kind: GatewayLeakKind
    work_id: str
    message: str


class GatewayLedger(msgspec.Struct, frozen=True, kw_only=True):
    requests: tuple[RequestEntry, ...]
    leases: tuple[LeaseEntry, ...]
    leaks: tuple[GatewayLeak, ...]
    """Empty unless there is a bug."""


def audit(hub: Hub) -> list[GatewayLeak]:
    """Empty when all is owned."""
    owned = {work_id for request in hub.open_requests for work_id in request.work_ids}
    pending = {each.work.request_id for each in hub.pending}
    leaks: list[GatewayLeak] = []
    for work_id in sorted(pending - owned):
        leaks.append(_leak(GatewayLeakKind.REQUESTS, work_id, "a worker has it, and no client's request waits for it"))
    for work_id in sorted((pending & owned) - hub.streams.keys()):
        leaks.append(_leak(GatewayLeakKind.REQUESTS, work_id, "a worker has it, and no stream takes what it answers"))
    for work_id in sorted(hub.streams.keys() - owned):
        leaks.append(_leak(GatewayLeakKind.STREAMS, work_id, "a stream is kept for it, and no client's request reads"))
    return leaks


def ledger_of(hub: Hub, *, now_ns: int) -> GatewayLedger:
    """As things are now."""
    return GatewayLedger(
        requests=tuple(_request(hub, request, now_ns=now_ns) for request in hub.open_requests),
        leases=tuple(_leases(hub, now_ns=now_ns)),
        leaks=tuple(audit(hub)),
    )


def log_lines(ledger: GatewayLedger) -> Iterator[str]:
    """One a request, a work, a lease and a leak; event name first."""
    for request in ledger.requests:
        yield f"ledger_request request_id={request.request_id} phase={request.phase} age_s={request.age_s:.3f}"
        for work in request.works:
            yield (
                f"ledger_work request_id={request.request_id} work_id={work.work_id} peer={work.worker_id} "
                f"dp_rank={work.dp_rank} num_buffered_deltas={work.num_buffered_deltas}"
            )
    for lease in ledger.leases:
        yield (
            f"ledger_lease peer={lease.worker_id} incarnation={lease.incarnation} role={lease.role} "
            f"age_s={lease.age_s:.3f} lease_left_s={lease.lease_left_s:.3f}"
        )
    for leak in ledger.leaks:
        yield f"ledger_leak kind={leak.kind.value} work_id={leak.work_id} what={leak.message!r}"


def _request(hub: Hub, request: OpenRequest, *, now_ns: int) -> RequestEntry:
    pending = {each.work.request_id: each for each in hub.pending}
    works: list[WorkEntry] = []
    for work_id in request.work_ids:
        stream, attempt = hub.streams.get(work_id), pending.get(work_id)
        works.append(
            WorkEntry(
                work_id=work_id,
                worker_id=None if attempt is None else attempt.worker_id,
                dp_rank=None if attempt is None else attempt.dp_rank,
                attempt_id=None if attempt is None else attempt.attempt_id,
                num_buffered_deltas=0 if stream is None else stream.num_deltas,
            )
        )
    return RequestEntry(
        request_id=request.request_id,
        phase=request.record.phase.value,
        age_s=ns_to_seconds(now_ns - request.record.received_ns),
        works=tuple(works),
    )


def _leases(hub: Hub, *, now_ns: int) -> Iterator[LeaseEntry]:
    for worker in hub.view.workers:
        yield LeaseEntry(
            worker_id=worker.worker_id,
            incarnation=str(worker.incarnation),
            role=worker.role.value,
            age_s=ns_to_seconds(now_ns - worker.joined_ns),
            lease_left_s=ns_to_seconds(worker.lease_deadline_ns - now_ns),
        )


def _leak(kind: GatewayLeakKind, work_id: RequestId, message: str) -> GatewayLeak:
    return GatewayLeak(kind=kind, work_id=work_id, message=message)
