"""A counter that is told its total by somebody who counts anyway."""

from prometheus_client import Counter


class Total:
    def __init__(self, counter: Counter) -> None:
        self._counter = counter
        self._total = 0

    def set(self, total: int) -> None:
        """Requires: `total` never falls."""
        self._counter.inc(total - self._total)
        self._total = total
