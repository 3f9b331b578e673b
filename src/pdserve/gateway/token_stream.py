"""The deltas of one request to a worker, on their way from the hub to the handler that answers the client."""

import asyncio
from collections import deque

from pdserve.gateway.failures import Failure, RequestFailed
from pdserve.wire.cluster import Delta


class TokenStream:
    """A bounded queue with one reader. Lifetime: from the dispatch to the end of the handler."""

    def __init__(self, *, max_deltas: int) -> None:
        self._max_deltas = max_deltas
        self._deltas: deque[Delta] = deque()
        self._failure: Failure | None = None
        self._changed = asyncio.Event()

    @property
    def num_deltas(self) -> int:
        """Not taken yet."""
        return len(self._deltas)

    def wake_with(self, changed: asyncio.Event) -> None:
        """From now on this event is set where there is something to take: one for all streams of one reader."""
        self._changed = changed
        changed.set()

    def put(self, delta: Delta) -> bool:
        """False, and nothing is kept, when the reader is too far behind."""
        if len(self._deltas) >= self._max_deltas:
            return False
        self._deltas.append(delta)
        self._changed.set()
        return True

    def fail(self, failure: Failure) -> None:
        """The reader gets what is queued, then the failure."""
        self._failure = failure
        self._changed.set()

    def take(self) -> Delta | None:
        """The next delta, None while there is none. Raises: `RequestFailed` once nothing precedes the failure."""
        if self._deltas:
            return self._deltas.popleft()
        if self._failure is not None:
            raise RequestFailed(self._failure)
        return None
