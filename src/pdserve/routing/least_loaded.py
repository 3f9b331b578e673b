"""Least-loaded routing.

Load is what a worker reported with its last heartbeat plus what was dispatched to it since (`RankView`):
- of a prefill worker, the prompt tokens that wait for prefill, for a pass takes time by tokens;
- of a data parallel rank of a decode worker, the sequences it holds, for a step takes time by sequences; where those
  are equal, fewer free pages is more load, and a rank without a free page comes after all that have one.
Equals take turns: the next is the one that was sent fewest sequences since its worker joined.

Ranks are balanced, not workers, for each rank has a KV cache and steps of its own: a worker of eight ranks gets eight
times what a worker of one gets.
"""

from collections.abc import Set
from dataclasses import dataclass

from pdserve.cluster.view import ClusterView, RankView, WorkerView
from pdserve.config.role import Role
from pdserve.errors import CapacityError
from pdserve.ids import WorkerId

NO_WORKER_RETRY_AFTER_S = 1.0
"""A worker joins within a heartbeat or two of being ready."""

RankKey = tuple[WorkerId, int]
"""A worker and one of its data parallel ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    decode: WorkerView
    dp_rank: int
    """The data parallel rank of `decode`."""
    prefill: WorkerView | None
    """None: the decode worker prefills the prompt itself."""


def choose(
    view: ClusterView,
    *,
    num_prompt_tokens: int,
    excluded_workers: Set[WorkerId] = frozenset(),
    excluded_ranks: Set[RankKey] = frozenset(),
) -> Route:
    """The least loaded rank of all decode workers, and the prefill worker for it; the last ties go to the lower id.

    An excluded worker is neither of the two, with all its ranks; an excluded rank leaves its worker's others. One that
    drains is neither, however little it has to do.

    Requires: `num_prompt_tokens >= 1`. The last prompt token is the decode worker's, so a prompt of one token has
    nothing to prefill elsewhere.
    Raises: `CapacityError` when no rank of a decode worker is left.
    """
    ranks = (
        (worker, rank)
        for worker, rank in view.decoding_ranks()
        if worker.worker_id not in excluded_workers and (worker.worker_id, rank.dp_rank) not in excluded_ranks
    )
    chosen = min(ranks, key=_decode_load, default=None)
    if chosen is None:
        raise CapacityError(_absence(view), retry_after_s=NO_WORKER_RETRY_AFTER_S)
    decode, rank = chosen
    if decode.role is Role.BOTH or num_prompt_tokens <= 1:
        return Route(decode=decode, dp_rank=rank.dp_rank, prefill=None)
    prefill = min(
        (worker for worker in view.taking_grants() if worker.worker_id not in excluded_workers),
        key=_prefill_load,
        default=None,
    )
    return Route(decode=decode, dp_rank=rank.dp_rank, prefill=prefill)


def _decode_load(candidate: tuple[WorkerView, RankView]) -> tuple[bool, int, int, int, WorkerId, int]:
    worker, rank = candidate
    free_pages = rank.load.num_free_pages
    return rank.is_full, rank.num_sequences, -free_pages, rank.num_turns, worker.worker_id, rank.dp_rank


def _prefill_load(worker: WorkerView) -> tuple[int, int, WorkerId]:
    (rank,) = worker.ranks
    return rank.num_waiting_tokens, rank.num_turns, worker.worker_id


def _absence(view: ClusterView) -> str:
    if any(True for _ in view.decoding()):
        return "every decode worker has failed or refused this request"
    if any(worker.draining for worker in view.workers if worker.role is not Role.PREFILL):
        return "every decode worker drains and will stop; start one with `pdserve worker --role decode --join URL`"
    return "no decode worker has joined; start one with `pdserve worker --role decode --join URL`"
