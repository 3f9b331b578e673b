"""Least-loaded routing.

Load is what a worker reported with its last heartbeat plus what was dispatched to it since (`RankView`):
- of a prefill worker, the prompt tokens that wait for prefill, for a pass takes time by tokens;
- of a data parallel rank of a decode worker, the sequences it holds, for a step takes time by sequences; where those
  are equal, fewer free pages is more load, and a rank without a free page comes after all that have one.
Equals take turns: the next is the one that was sent fewest sequences since its worker joined.

Ranks are balanced, not workers, for each rank has a KV cache and steps of its own: a worker of eight ranks gets eight
times what a worker of one gets.
"""

from collections.abc import Mapping, Set
from dataclasses import dataclass

from pdserve.cluster.view import RankView, WorkerView
from pdserve.config.role import Role
from pdserve.errors import CapacityError
from pdserve.ids import WorkerId
from pdserve.routing.order import Order, RankKey

NO_WORKER_RETRY_AFTER_S = 1.0
"""A worker joins within a heartbeat or two of being ready."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    decode: WorkerView
    dp_rank: int
    """The data parallel rank of `decode`."""
    prefill: WorkerView | None
    """None: the decode worker prefills the prompt itself."""


class LeastLoaded:
    """Keeps the workers in order as they change, so that a choice among thousands of ranks costs microseconds."""

    def __init__(self) -> None:
        self._workers: dict[WorkerId, WorkerView] = {}
        self._decoding: Order[tuple[bool, int, int, int]] = Order()
        self._prefilling: Order[tuple[int, int]] = Order()

    def update(self, changed: Mapping[WorkerId, WorkerView | None]) -> None:
        """Workers as they are now; None: gone."""
        for worker_id, worker in changed.items():
            before = self._workers.pop(worker_id, None)
            if before is not None and (worker is None or not _is_alike(before, worker)):
                self._take_out(before)
            if worker is not None:
                self._workers[worker_id] = worker
                self._put(worker)

    def choose(
        self,
        *,
        num_prompt_tokens: int,
        excluded_workers: Set[WorkerId] = frozenset(),
        excluded_ranks: Set[RankKey] = frozenset(),
    ) -> Route:
        """The least loaded rank of all decode workers, and the prefill worker for it; last ties go to the lower id.

        An excluded worker is neither of the two, with all its ranks; an excluded rank leaves its worker's others. One
        that drains is neither, however little it has to do.

        Requires: `num_prompt_tokens >= 1`. The last prompt token is the decode worker's, so a prompt of one token has
        nothing to prefill elsewhere.
        Raises: `CapacityError` when no rank of a decode worker is left.
        """
        chosen = self._decoding.first(
            is_allowed=lambda rank: rank[0] not in excluded_workers and rank not in excluded_ranks
        )
        if chosen is None:
            raise CapacityError(self._absence(), retry_after_s=NO_WORKER_RETRY_AFTER_S)
        decode, dp_rank = self._workers[chosen[0]], chosen[1]
        if decode.role is Role.BOTH or num_prompt_tokens <= 1:
            return Route(decode=decode, dp_rank=dp_rank, prefill=None)
        prefill = self._prefilling.first(is_allowed=lambda rank: rank[0] not in excluded_workers)
        return Route(decode=decode, dp_rank=dp_rank, prefill=None if prefill is None else self._workers[prefill[0]])

    def _put(self, worker: WorkerView) -> None:
        if worker.draining:
            return
        if worker.role is Role.PREFILL:
            self._prefilling.put((worker.worker_id, 0), _prefill_load(worker))
        else:
            for rank in worker.ranks:
                self._decoding.put((worker.worker_id, rank.dp_rank), _decode_load(rank))

    def _take_out(self, worker: WorkerView) -> None:
        for rank in worker.ranks:
            self._prefilling.discard((worker.worker_id, rank.dp_rank))
            self._decoding.discard((worker.worker_id, rank.dp_rank))

    def _absence(self) -> str:
        decoding = [worker for worker in self._workers.values() if worker.role is not Role.PREFILL]
        if not all(worker.draining for worker in decoding):
            return "every decode worker has failed or refused this request"
        if decoding:
            return "every decode worker drains and will stop; start one with `pdserve worker --role decode --join URL`"
        return "no decode worker has joined; start one with `pdserve worker --role decode --join URL`"


def _is_alike(before: WorkerView, after: WorkerView) -> bool:
    """It has the same ranks in the same orders."""
    return (before.role, before.draining, len(before.ranks)) == (after.role, after.draining, len(after.ranks))


def _decode_load(rank: RankView) -> tuple[bool, int, int, int]:
    return rank.is_full, rank.num_sequences, -rank.load.num_free_pages, rank.num_turns


def _prefill_load(worker: WorkerView) -> tuple[int, int]:
    (rank,) = worker.ranks
    return rank.num_waiting_tokens, rank.num_turns
