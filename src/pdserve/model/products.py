"""The matrix products of a model. An engine may replace each of these modules by kernels of its own.

Shape suffixes: T rows, N heads, I inputs, O outputs.
"""

import torch
from torch import nn
from torch.nn import functional


class Linear(nn.Module):
    """x W^T + b. May have no outputs: a rank can be without columns."""

    def __init__(self, in_dim: int, out_dim: int, *, has_bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_dim, in_dim))
        self.bias = nn.Parameter(torch.empty(out_dim)) if has_bias else None

    def forward(self, x_TI: torch.Tensor) -> torch.Tensor:
        return functional.linear(x_TI, self.weight, self.bias)


class GatedLinear(nn.Module):
    """silu(x G^T) * (x U^T), with G above U in one weight."""

    def __init__(self, in_dim: int, out_dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2 * out_dim, in_dim))

    def forward(self, x_TI: torch.Tensor) -> torch.Tensor:
        gate_TO, up_TO = functional.linear(x_TI, self.weight).chunk(2, dim=-1)
        return functional.silu(gate_TO) * up_TO


class HeadLinear(nn.Module):
    """A product of its own for each head: x_TNI to y_TNO. Its weight is a view, and comes from no checkpoint."""

    weight: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", None, persistent=False)

    def set_weight(self, weight_NOI: torch.Tensor) -> None:
        self.register_buffer("weight", weight_NOI, persistent=False)

    def forward(self, x_TNI: torch.Tensor) -> torch.Tensor:
        return torch.einsum("tni,noi->tno", x_TNI, self.weight)
