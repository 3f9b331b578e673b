"""The port between the runner and what computes: plain torch anywhere, native kernels on a CPU."""

from collections.abc import Sequence
from typing import Protocol

import torch

from pdserve.model.decoder import OnLayer
from pdserve.schedule.batch import Chunk


class Executor(Protocol):
    """Shape suffixes: T tokens of all chunks, one after another; R chosen rows of them; E hidden; V vocabulary."""

    def forward(self, chunks: Sequence[Chunk], on_layer: OnLayer) -> torch.Tensor:
        """x_TE before the final norm. `on_layer(L)` comes when the KV of layer L is in the pages, or, on a device, when
        what puts it there has been launched.

        Requires: chunks checked against the model and the pool, at least one token.
        """
        ...

    def final_norm(self, x_RE: torch.Tensor) -> torch.Tensor: ...

    def logits(self, normed_RE: torch.Tensor) -> torch.Tensor:
        """logits_RV in float32, in host memory."""
        ...
