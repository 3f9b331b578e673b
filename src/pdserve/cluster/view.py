"""What is known of the workers at one moment; routing decides on it, `/workers` shows it."""

from collections.abc import Iterator
from dataclasses import dataclass

from pdserve.config.role import Role
from pdserve.ids import Incarnation, WorkerId
from pdserve.wire.cluster import Load


@dataclass(frozen=True, slots=True, kw_only=True)
class RankView:
    """One data parallel rank of a worker: what a request is balanced over."""

    dp_rank: int
    load: Load
    """From the worker's last heartbeat."""
    num_dispatched_sequences: int = 0
    """What was sent to this rank since that heartbeat, so that a burst between two heartbeats spreads."""
    num_dispatched_tokens: int = 0
    num_turns: int = 0
    """Sequences sent to this rank since its worker joined: among equals, the one with fewest is next."""

    @property
    def num_sequences(self) -> int:
        """Sequences the rank holds or is about to."""
        return self.load.num_running + self.load.num_waiting + self.num_dispatched_sequences

    @property
    def num_waiting_tokens(self) -> int:
        """Prompt tokens that wait for prefill there, or are about to."""
        return self.load.num_waiting_tokens + self.num_dispatched_tokens

    @property
    def is_full(self) -> bool:
        """It has pages, and none is free."""
        return self.load.num_pages > 0 and self.load.num_free_pages == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerView:
    worker_id: WorkerId
    incarnation: Incarnation
    role: Role
    url: str
    max_model_len: int
    tensor_parallel_size: int
    ranks: tuple[RankView, ...]
    """By data parallel rank; at least one, and exactly one of a prefill worker."""
    joined_ns: int
    lease_ns: int
    lease_deadline_ns: int
    num_prefill_peers: int = 0
    """Prefill workers that it is connected to, as of its last heartbeat."""
    draining: bool = False
    """It finishes what it has and is given nothing new; as of its last heartbeat."""

    @property
    def takes_requests(self) -> bool:
        return self.role in (Role.DECODE, Role.BOTH) and not self.draining


@dataclass(frozen=True, slots=True)
class ClusterView:
    """Workers with a live lease, ascending by id."""

    workers: tuple[WorkerView, ...] = ()

    def decoding(self) -> Iterator[WorkerView]:
        """Workers that can be given a request."""
        return (worker for worker in self.workers if worker.takes_requests)

    def decoding_ranks(self) -> Iterator[tuple[WorkerView, RankView]]:
        """All ranks of the workers that can be given a request, ascending by worker id, then rank."""
        return ((worker, rank) for worker in self.decoding() for rank in worker.ranks)

    def prefilling(self) -> Iterator[WorkerView]:
        """Workers that decode workers keep connections to, draining ones too, whose handoffs go on over them.

        One of both roles prefills for itself only.
        """
        return (worker for worker in self.workers if worker.role is Role.PREFILL)

    def taking_grants(self) -> Iterator[WorkerView]:
        """Those of `prefilling` that take new grants."""
        return (worker for worker in self.prefilling() if not worker.draining)

    def find(self, worker_id: WorkerId) -> WorkerView | None:
        return next((worker for worker in self.workers if worker.worker_id == worker_id), None)
