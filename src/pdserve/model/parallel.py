"""How a model is cut over the ranks of a tensor parallel group.

Every product is cut by output columns, and activations are gathered, never summed over ranks: each value is one whole
dot product, computed on one rank in the order that the kernel has anyway. So with kernels whose sums do not depend on
the shape, bits do not depend on the number of ranks, the chunk cut or the batch (rule H8); a ring all-reduce adds in an
order that depends on the size of the message. Of the bytes that an all-reduce moves, gathering moves about as many for
the attention, and more for the feed-forward in the ratio of its dimension to the hidden one.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from pdserve.errors import ConfigError

COLUMN_MULTIPLE = 16
"""Ranges of columns start at multiples of this: the lanes of the CPU kernels' blocks."""


class Communicator(Protocol):
    """The ranks that run one pass together, as one of them sees it.

    Every rank makes the same calls in the same order.
    """

    rank: int
    num_ranks: int

    def gather_columns(self, x_TW: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        """The columns of all ranks side by side, on every rank: `[T, sum(widths)]`.

        Requires: `x_TW` has the `widths[rank]` columns of this rank, T is the same on all ranks.
        Raises: `InternalError` when another rank is gone.
        """
        ...


class SingleRank:
    """The communicator of a model that is not cut."""

    rank = 0
    num_ranks = 1

    def gather_columns(self, x_TW: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        return x_TW


def column_ranges(num_columns: int, *, num_ranks: int, multiple: int = COLUMN_MULTIPLE) -> tuple[range, ...]:
    """Each rank's columns: whole multiples, as equal as can be; the last one takes what is left over.

    A rank may have none when there are fewer multiples than ranks.
    """
    num_units = -(-num_columns // multiple)
    bounds = [min(num_columns, num_units * rank // num_ranks * multiple) for rank in range(num_ranks + 1)]
    return tuple(range(start, stop) for start, stop in itertools.pairwise(bounds))


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """The output columns of one kind of product, by rank."""

    ranges: tuple[range, ...]
    rank: int

    @property
    def ours(self) -> range:
        return self.ranges[self.rank]

    @property
    def widths(self) -> tuple[int, ...]:
        return tuple(len(columns) for columns in self.ranges)

    @property
    def total(self) -> int:
        """Columns of the whole product."""
        return self.ranges[-1].stop


def cut_columns(num_columns: int, communicator: Communicator) -> Columns:
    """Cut a product whose columns are all alike."""
    return Columns(ranges=column_ranges(num_columns, num_ranks=communicator.num_ranks), rank=communicator.rank)


def cut_heads(num_heads: int, *, columns_per_head: int, communicator: Communicator) -> Columns:
    """Cut a product whose columns are heads: each rank has whole ones, and equally many.

    Raises: `ConfigError` when the ranks do not divide the heads.
    """
    num_ranks = communicator.num_ranks
    if num_heads % num_ranks:
        raise ConfigError(f"tensor parallel size {num_ranks} does not divide the model's {num_heads} attention heads")
    width = num_heads // num_ranks * columns_per_head
    return Columns(
        ranges=tuple(range(rank * width, (rank + 1) * width) for rank in range(num_ranks)), rank=communicator.rank
    )
