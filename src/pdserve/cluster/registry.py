"""The registry of workers: joins, heartbeats and leases in, changes out.

Invariants (the state machine test checks them):
1. At most one incarnation of a worker id is present, and at most `max_workers` workers.
2. All present workers serve one model with one fingerprint: that of the first to join an empty registry.
3. An incarnation that was superseded by another of the same worker id does not come back while any other is present.
   Not for ever: incarnations have no order, and a join can be on its way for longer than its process lives.
4. A worker is present exactly from its `Joined` to its `Left`; `expire` leaves nobody whose lease is over.
5. A present worker has as many ranks as its join named: 1 to `MAX_RANKS`, and 1 where it prefills for others.
"""

from collections import OrderedDict
from dataclasses import dataclass, replace
from enum import Enum

from pdserve.cluster.contexts import Contexts
from pdserve.cluster.view import ClusterView, RankView, WorkerView
from pdserve.config.role import Role
from pdserve.errors import RemoteProtocolError
from pdserve.ids import Incarnation, WorkerId
from pdserve.units import seconds_to_ns
from pdserve.wire.cluster import Join, Load, WorkerHeartbeat
from pdserve.wire.peer import PROTOCOL_VERSION

MIN_LEASE_S = 0.2
"""Under this a scheduling hiccup of the operating system would expire a healthy worker."""

MAX_LEASE_S = 60.0
"""Over this a dead worker keeps getting requests for too long."""

MAX_SUPERSEDED = 4096
"""Superseded incarnations that are remembered: a worker that restarts each second is covered for an hour."""

MAX_RANKS = 1024
"""Data parallel ranks of one worker: far over what stands behind one address; bounds what each choice looks at."""


class LeaveReason(Enum):
    CLOSED = "closed"
    """Its connection ended."""
    SAID_SO = "said_so"
    """It stopped in good order."""
    EXPIRED = "expired"
    """Its lease ran out."""
    REPLACED = "replaced"
    """The same worker id joined again: restarted (a new incarnation), or reconnected (the same)."""


@dataclass(frozen=True, slots=True)
class Joined:
    worker: WorkerView


@dataclass(frozen=True, slots=True)
class Left:
    worker: WorkerView
    reason: LeaveReason


@dataclass(frozen=True, slots=True)
class Refused:
    """Nothing changed; `message` says what differs, with both values."""

    message: str


class Registry:
    """Times are ns of one monotonic clock; every method takes now and none reads a clock."""

    def __init__(self, *, model_name: str, max_workers: int) -> None:
        self._model_name = model_name
        self._max_workers = max_workers
        self._fingerprint: str | None = None
        self._workers: dict[WorkerId, WorkerView] = {}
        self._superseded: OrderedDict[tuple[WorkerId, Incarnation], None] = OrderedDict()
        self._view: ClusterView | None = ClusterView()
        """None: to be made anew, when somebody looks."""
        self._changed: set[WorkerId] = set()
        self._contexts = Contexts()

    @property
    def view(self) -> ClusterView:
        """Cost: O(n log n) after a change."""
        if self._view is None:
            self._view = ClusterView(tuple(self._workers[worker_id] for worker_id in sorted(self._workers)))
        return self._view

    def take_changed(self) -> dict[WorkerId, WorkerView | None]:
        """Workers that joined, changed or left since the last call, as they are now; None: gone. For one caller."""
        changed = {worker_id: self._workers.get(worker_id) for worker_id in self._changed}
        self._changed.clear()
        return changed

    @property
    def max_model_len(self) -> int | None:
        """The longest context that every worker that can be given a request takes; None without one. Cost: O(1)."""
        return self._contexts.shared

    @property
    def fingerprint(self) -> str | None:
        """Of the model all present workers serve; None while nobody is present."""
        return self._fingerprint

    def join(self, join: Join, now_ns: int) -> tuple[Left | Joined, ...] | Refused:
        """`Joined`, after the `Left` of the predecessor where one was present; or the reason why not."""
        objection = self._objection(join)
        if objection is not None:
            return Refused(objection)
        predecessor = self._workers.get(join.worker_id)
        if predecessor is not None and predecessor.incarnation != join.incarnation:
            self._supersede(predecessor)
        lease_ns = seconds_to_ns(join.lease_s)
        worker = WorkerView(
            worker_id=join.worker_id,
            incarnation=join.incarnation,
            role=join.role,
            url=join.url,
            max_model_len=join.max_model_len,
            tensor_parallel_size=join.tensor_parallel_size,
            ranks=_ranks_of(join.loads),
            joined_ns=now_ns,
            lease_ns=lease_ns,
            lease_deadline_ns=now_ns + lease_ns,
        )
        self._workers[join.worker_id] = worker
        self._fingerprint = join.model_fingerprint
        self._has_changed(join.worker_id)
        if predecessor is None:
            return (Joined(worker),)
        return (Left(predecessor, LeaveReason.REPLACED), Joined(worker))

    def heartbeat(self, worker_id: WorkerId, heartbeat: WorkerHeartbeat, now_ns: int) -> bool:
        """Renew the lease; False (and nothing changed) when that incarnation is not the one present.

        Raises: `RemoteProtocolError` (and nothing changed) when it has not a load for each rank of the join.
        """
        worker = self._workers.get(worker_id)
        if worker is None or worker.incarnation != heartbeat.sender:
            return False
        if len(heartbeat.loads) != len(worker.ranks):
            raise RemoteProtocolError(
                f"{len(heartbeat.loads)} loads in a heartbeat, {len(worker.ranks)} data parallel ranks in the Join",
                peer=worker_id,
            )
        self._workers[worker_id] = replace(
            worker,
            ranks=tuple(
                RankView(dp_rank=before.dp_rank, load=load, num_turns=before.num_turns)
                for before, load in zip(worker.ranks, heartbeat.loads, strict=True)
            ),
            num_prefill_peers=heartbeat.num_prefill_peers,
            draining=heartbeat.draining,
            lease_deadline_ns=now_ns + worker.lease_ns,
        )
        self._has_changed(worker_id)
        return True

    def leave(
        self, worker_id: WorkerId, incarnation: Incarnation, reason: LeaveReason = LeaveReason.CLOSED
    ) -> tuple[Left, ...]:
        """That incarnation said goodbye, or its connection ended; empty when it was not present."""
        worker = self._workers.get(worker_id)
        if worker is None or worker.incarnation != incarnation:
            return ()
        return self._remove((worker,), reason)

    def expire(self, now_ns: int) -> tuple[Left, ...]:
        """Drop the workers whose lease ran out."""
        overdue = [worker for worker in self._workers.values() if worker.lease_deadline_ns <= now_ns]
        overdue.sort(key=lambda worker: worker.worker_id)
        return self._remove(tuple(overdue), LeaveReason.EXPIRED)

    def dispatched(self, worker_id: WorkerId, *, dp_rank: int, num_sequences: int, num_tokens: int) -> None:
        """Note what was sent to a rank of a worker; counts as its load until the next heartbeat.

        Requires: `dp_rank` is one of the worker's, where it is present.
        """
        worker = self._workers.get(worker_id)
        if worker is None:
            return
        before = worker.ranks[dp_rank]
        rank = replace(
            before,
            num_dispatched_sequences=before.num_dispatched_sequences + num_sequences,
            num_dispatched_tokens=before.num_dispatched_tokens + num_tokens,
            num_turns=before.num_turns + num_sequences,
        )
        self._workers[worker_id] = replace(worker, ranks=(*worker.ranks[:dp_rank], rank, *worker.ranks[dp_rank + 1 :]))
        self._has_changed(worker_id)

    def _objection(self, join: Join) -> str | None:
        if join.protocol_version != PROTOCOL_VERSION:
            return f"the gateway speaks protocol version {PROTOCOL_VERSION}, the worker {join.protocol_version}"
        if join.model_name != self._model_name:
            return f"the gateway serves model {self._model_name!r}, the worker {join.model_name!r}"
        if self._is_superseded(join):
            return f"another process has taken the worker id {join.worker_id!r}; give each worker its own"
        others = [worker for worker in self._workers if worker != join.worker_id]
        if others and join.model_fingerprint != self._fingerprint:
            return (
                f"the other workers' model has the fingerprint {self._fingerprint!r}, this worker's has "
                f"{join.model_fingerprint!r}: their weights, configuration or --speculate differ"
            )
        if len(others) >= self._max_workers:
            return f"the gateway already has {len(others)} workers, the most it takes"
        if not MIN_LEASE_S <= join.lease_s <= MAX_LEASE_S:
            return f"lease_s must be between {MIN_LEASE_S:g} and {MAX_LEASE_S:g}, the worker asks for {join.lease_s:g}"
        if join.max_model_len < 1:
            return f"max_model_len must be at least 1, the worker says {join.max_model_len}"
        return _objection_to_ranks(join)

    def _is_superseded(self, join: Join) -> bool:
        present = self._workers.get(join.worker_id)
        is_other = present is not None and present.incarnation != join.incarnation
        return is_other and (join.worker_id, join.incarnation) in self._superseded

    def _supersede(self, worker: WorkerView) -> None:
        self._superseded[worker.worker_id, worker.incarnation] = None
        if len(self._superseded) > MAX_SUPERSEDED:
            self._superseded.popitem(last=False)

    def _remove(self, workers: tuple[WorkerView, ...], reason: LeaveReason) -> tuple[Left, ...]:
        if not workers:
            return ()
        for worker in workers:
            del self._workers[worker.worker_id]
            self._has_changed(worker.worker_id)
        if not self._workers:
            self._fingerprint = None
        return tuple(Left(worker, reason) for worker in workers)

    def _has_changed(self, worker_id: WorkerId) -> None:
        self._view = None
        self._changed.add(worker_id)
        worker = self._workers.get(worker_id)
        self._contexts.set(worker_id, worker.max_model_len if worker is not None and worker.takes_requests else None)


def _objection_to_ranks(join: Join) -> str | None:
    num_ranks = len(join.loads)
    if not 1 <= num_ranks <= MAX_RANKS:
        return f"a worker has 1 to {MAX_RANKS} data parallel ranks, this one says {num_ranks}"
    if join.role is Role.PREFILL and num_ranks > 1:
        return (
            f"a prefill worker has 1 data parallel rank, this one says {num_ranks}; start more prefill workers "
            "instead, --data-parallel-size is for decode workers"
        )
    return None


def _ranks_of(loads: tuple[Load, ...]) -> tuple[RankView, ...]:
    return tuple(RankView(dp_rank=dp_rank, load=load) for dp_rank, load in enumerate(loads))
