"""What was seen of each process over the run, in columns."""

import msgspec


class Life(msgspec.Struct, kw_only=True):
    """One process from its start, or the run's, to its end; index i of each column is one sample.

    A worker that is killed and started again has another life under the same name.
    """

    name: str
    """Such as `decode-0`, or `decode-0/rank` for a process that it started."""
    pid: int
    at_s: list[float] = []
    """Since the run's start."""
    is_loaded: list[bool] = []
    """Whether requests were being sent."""
    rss_bytes: list[int] = []
    shared_rss_bytes: list[int] = []
    """Of these, pages of tmpfs."""
    num_fds: list[int] = []
    num_threads: list[int] = []
    shared_bytes: list[int] = []

    @property
    def span_s(self) -> float:
        return self.at_s[-1] - self.at_s[0] if self.at_s else 0.0


class LedgerHistory(msgspec.Struct, kw_only=True):
    """What `GET /debug/ledger` of the gateway or a worker said, whichever life it was in; columns as above."""

    name: str
    at_s: list[float] = []
    num_owners: list[int] = []
    """On a worker whoever has pages, slots or immediates; on the gateway requests."""
    num_used_pages: list[int] = []
    leaks: list[str] = []
    """Not a column: each leak that was told at any time."""


class IdleFigures(msgspec.Struct, frozen=True, kw_only=True):
    pid: int
    num_fds: int
    num_threads: int
    shared_bytes: int


class IdlePoint(msgspec.Struct, frozen=True, kw_only=True):
    """Before the first round and after each, once no request was left."""

    at_s: float
    processes: dict[str, IdleFigures]
    """By name, as in `Life`."""
    owned: tuple[str, ...]
    """What the ledgers still held when the time to become idle was over; empty when all went well."""
