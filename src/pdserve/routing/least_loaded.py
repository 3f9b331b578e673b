"""Least-loaded routing.

Load is what a worker reported with its last heartbeat plus what was dispatched to it since (`WorkerView`):
- of a prefill worker, the prompt tokens that wait for prefill, for a pass takes time by tokens;
- of a decode worker, the sequences it holds, for a step takes time by sequences; where those are equal, fewer free
  pages is more load, and a worker without a free page comes after all that have one.
"""

from collections.abc import Set
from dataclasses import dataclass

from pdserve.cluster.view import ClusterView, WorkerView
from pdserve.config.role import Role
from pdserve.errors import CapacityError
from pdserve.ids import WorkerId

NO_WORKER_RETRY_AFTER_S = 1.0
"""A worker joins within a heartbeat or two of being ready."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    decode: WorkerView
    prefill: WorkerView | None
    """None: the decode worker prefills the prompt itself."""


def choose(view: ClusterView, *, num_prompt_tokens: int, excluded: Set[WorkerId] = frozenset()) -> Route:
    """The least loaded decode worker that is not excluded, and the prefill worker for it; ties go to the lower id.

    Requires: `num_prompt_tokens >= 1`. The last prompt token is the decode worker's, so a prompt of one token has
    nothing to prefill elsewhere.
    Raises: `CapacityError` when no decode worker is left.
    """
    decode = min(
        (worker for worker in view.decoding() if worker.worker_id not in excluded), key=_decode_load, default=None
    )
    if decode is None:
        raise CapacityError(_absence(view), retry_after_s=NO_WORKER_RETRY_AFTER_S)
    if decode.role is Role.BOTH or num_prompt_tokens <= 1:
        return Route(decode=decode, prefill=None)
    prefill = min(
        (worker for worker in view.prefilling() if worker.worker_id not in excluded), key=_prefill_load, default=None
    )
    return Route(decode=decode, prefill=prefill)


def _decode_load(worker: WorkerView) -> tuple[bool, int, int, WorkerId]:
    is_full = worker.load.num_pages > 0 and worker.load.num_free_pages == 0
    return is_full, worker.num_sequences, -worker.load.num_free_pages, worker.worker_id


def _prefill_load(worker: WorkerView) -> tuple[int, WorkerId]:
    return worker.num_waiting_tokens, worker.worker_id


def _absence(view: ClusterView) -> str:
    if any(True for _ in view.decoding()):
        return "every decode worker has failed or refused this request"
    return "no decode worker has joined; start one with `pdserve worker --role decode --join URL`"
