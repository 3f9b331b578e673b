"""Root mean square normalisation."""

import torch
from torch import nn


class RmsNorm(nn.Module):
    """Normalised in float32 whatever the dtype, as the checkpoints were trained."""

    def __init__(self, dim: int, *, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x_float = x.float()
        scale = torch.rsqrt(x_float.square().mean(dim=-1, keepdim=True) + self.eps)
        return (x_float * scale).to(x.dtype) * self.weight
