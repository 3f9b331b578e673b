"""The gated feed-forward block, cut by columns.

Shape suffixes: T tokens, E hidden.
"""

import torch
from torch import nn

from pdserve.model.parallel import Columns, Communicator
from pdserve.model.products import GatedLinear, Linear
from pdserve.model.weight_rows import Rows, Sources


class FeedForward(nn.Module):
    """Returns all hidden columns on every rank."""

    def __init__(self, hidden_dim: int, *, ffn: Columns, hidden: Columns, communicator: Communicator) -> None:
        super().__init__()
        self._ffn, self._hidden, self._communicator = ffn, hidden, communicator
        self.gate_up = GatedLinear(hidden_dim, len(ffn.ours))
        self.down = Linear(ffn.total, len(hidden.ours))

    def forward(self, x_TE: torch.Tensor) -> torch.Tensor:
        return self._communicator.gather_columns(self.columns(x_TE), self._hidden.widths)

    def columns(self, x_TE: torch.Tensor) -> torch.Tensor:
        """This rank's hidden columns alone."""
        gated = self._communicator.gather_columns(self.gate_up(x_TE), self._ffn.widths)
        return self.down(gated)

    def sources(self) -> Sources:
        return {
            "gate_up.weight": (
                Rows(tensor="gate_proj.weight", cut=self._ffn),
                Rows(tensor="up_proj.weight", cut=self._ffn),
            ),
            "down.weight": (Rows(tensor="down_proj.weight", cut=self._hidden),),
        }
