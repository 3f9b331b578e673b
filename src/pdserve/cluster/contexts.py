"""The longest context that every worker that is given requests can take, kept as they come and go."""

from collections import Counter

from pdserve.ids import WorkerId


class Contexts:
    """`shared` is looked up for each request, while thousands of workers change rarely.

    Invariant: `shared` is the least of what was set last for each worker.
    """

    def __init__(self) -> None:
        self._by_worker: dict[WorkerId, int] = {}
        self._num_workers: Counter[int] = Counter()
        """By context; none is 0."""
        self.shared: int | None = None
        """None: there is no worker."""

    def set(self, worker_id: WorkerId, max_model_len: int | None) -> None:
        """None: it is given no requests.

        Cost: O(1) while nothing changes for it, else O(number of different contexts).
        """
        before = self._by_worker.get(worker_id)
        if before == max_model_len:
            return
        if before is not None:
            del self._by_worker[worker_id]
            self._num_workers[before] -= 1
            if not self._num_workers[before]:
                del self._num_workers[before]
        if max_model_len is not None:
            self._by_worker[worker_id] = max_model_len
            self._num_workers[max_model_len] += 1
        self.shared = min(self._num_workers, default=None)
