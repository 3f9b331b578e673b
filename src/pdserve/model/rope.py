"""Rotary position embedding, half-split form: dimension i turns together with dimension i + D/2.

Shape suffixes: T tokens, N heads, D head dimension, R = D/2 rotary pairs, P positions.
"""

import math

import torch

from pdserve.model.config import Llama3Scaling, ModelConfig


def rope_tables(config: ModelConfig, *, num_positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(cos_PR, sin_PR) in float32 for positions `[0, num_positions)`."""
    exponents_R = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies_R = 1.0 / (config.rope_theta**exponents_R)
    if config.rope_scaling is not None:
        frequencies_R = _stretch(frequencies_R, config.rope_scaling)
    angles_PR = torch.arange(num_positions, dtype=torch.float32)[:, None] * frequencies_R[None, :]
    return angles_PR.cos(), angles_PR.sin()


def _stretch(frequencies_R: torch.Tensor, scaling: Llama3Scaling) -> torch.Tensor:
    """Long wavelengths are divided by `factor`, short ones kept, those between interpolated."""
    turns_R = scaling.original_max_positions / (2 * math.pi / frequencies_R)
    share_kept_R = (turns_R - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    share_kept_R = share_kept_R.clamp(0.0, 1.0)
    return (1 - share_kept_R) * frequencies_R / scaling.factor + share_kept_R * frequencies_R


def rotate(x_TND: torch.Tensor, cos_TR: torch.Tensor, sin_TR: torch.Tensor) -> torch.Tensor:
    first_TNR, second_TNR = x_TND.chunk(2, dim=-1)
    cos_T1R, sin_T1R = cos_TR[:, None, :].to(x_TND.dtype), sin_TR[:, None, :].to(x_TND.dtype)
    return torch.cat(
        (first_TNR * cos_T1R - second_TNR * sin_T1R, second_TNR * cos_T1R + first_TNR * sin_T1R),
        dim=-1,
    )
