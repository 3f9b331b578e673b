"""What is known of the workers at one moment; routing decides on it, `/workers` shows it."""

from collections.abc import Iterator
from dataclasses import dataclass

from pdserve.config.role import Role
from pdserve.ids import Incarnation, WorkerId
from pdserve.wire.cluster import Load


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerView:
    worker_id: WorkerId
    incarnation: Incarnation
    role: Role
    url: str
    max_model_len: int
    load: Load
    """From the last heartbeat."""
    joined_ns: int
    lease_ns: int
    lease_deadline_ns: int
    num_dispatched_sequences: int = 0
    """What was sent to this worker since its last heartbeat, so that a burst between two heartbeats spreads."""
    num_dispatched_tokens: int = 0

    @property
    def num_sequences(self) -> int:
        """Sequences the worker holds or is about to."""
        return self.load.num_running + self.load.num_waiting + self.num_dispatched_sequences

    @property
    def num_waiting_tokens(self) -> int:
        """Prompt tokens that wait for prefill there, or are about to."""
        return self.load.num_waiting_tokens + self.num_dispatched_tokens


@dataclass(frozen=True, slots=True)
class ClusterView:
    """Workers with a live lease, ascending by id."""

    workers: tuple[WorkerView, ...] = ()

    def decoding(self) -> Iterator[WorkerView]:
        """Workers that can own a request."""
        return (worker for worker in self.workers if worker.role in (Role.DECODE, Role.BOTH))

    def prefilling(self) -> Iterator[WorkerView]:
        """Workers that take grants. One of both roles prefills for itself only."""
        return (worker for worker in self.workers if worker.role is Role.PREFILL)

    def find(self, worker_id: WorkerId) -> WorkerView | None:
        return next((worker for worker in self.workers if worker.worker_id == worker_id), None)

    @property
    def max_model_len(self) -> int | None:
        """The longest context that every decode worker can take; None without one."""
        return min((worker.max_model_len for worker in self.decoding()), default=None)
