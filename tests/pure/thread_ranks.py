"""Ranks of a tensor parallel group as threads of the test, with a communicator that gathers through memory."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from pdserve.model.parallel import Communicator, SingleRank

Result = TypeVar("Result")

_DEADLINE_S = 60.0


class _Meeting:
    """Where the ranks put their columns, and wait for each other."""

    def __init__(self, num_ranks: int) -> None:
        self.barrier = threading.Barrier(num_ranks, timeout=_DEADLINE_S)
        self.columns: list[torch.Tensor] = [torch.empty(0)] * num_ranks


class ThreadCommunicator:
    def __init__(self, meeting: _Meeting, *, rank: int, num_ranks: int) -> None:
        self._meeting = meeting
        self.rank, self.num_ranks = rank, num_ranks

    @classmethod
    def alone(cls, *, num_ranks: int) -> "ThreadCommunicator":
        """Rank 0, for what needs no other."""
        return cls(_Meeting(num_ranks), rank=0, num_ranks=num_ranks)

    def gather_columns(self, x_TW: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        assert x_TW.shape[1] == widths[self.rank]
        self._meeting.columns[self.rank] = x_TW
        self._meeting.barrier.wait()
        gathered = torch.cat(self._meeting.columns, dim=1)
        self._meeting.barrier.wait()
        assert gathered.shape[1] == sum(widths)
        return gathered


def run_ranks(num_ranks: int, run: Callable[[Communicator], Result]) -> list[Result]:
    """What `run` returns on each rank. The first rank that fails ends the others too."""
    if num_ranks == 1:
        return [run(SingleRank())]
    meeting = _Meeting(num_ranks)

    def run_rank(rank: int) -> Result:
        try:
            return run(ThreadCommunicator(meeting, rank=rank, num_ranks=num_ranks))
        except BaseException:
            meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(num_ranks) as pool:
        return list(pool.map(run_rank, range(num_ranks)))
