"""How many tokens a worker guesses, and how many of its guesses are right."""

from prometheus_client import CollectorRegistry, Counter


class DraftCounters:
    """Threads: the event loop's only."""

    def __init__(self, registry: CollectorRegistry) -> None:
        labels = ("dp_rank",)
        self._tried = Counter(
            "pdserve:draft_tokens_total", "Tokens guessed and tried in passes.", labels, registry=registry
        )
        self._accepted = Counter(
            "pdserve:draft_tokens_accepted_total", "Guesses sampled in their place.", labels, registry=registry
        )

    def observe(self, dp_rank: int, *, num_tried: int, num_accepted: int) -> None:
        """Of one pass."""
        self._tried.labels(dp_rank).inc(num_tried)
        self._accepted.labels(dp_rank).inc(num_accepted)
