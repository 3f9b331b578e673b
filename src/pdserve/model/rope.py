"""Rotary position embedding, half-split form: dimension i turns together with dimension i + D/2.

Shape suffixes: T tokens, N heads, D rotary dimension, R = D/2 rotary pairs, P positions.
"""

import math

import torch

from pdserve.model.config import ModelConfig
from pdserve.model.rope_config import Llama3Scaling, YarnScaling


def rope_tables(config: ModelConfig, *, num_positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(cos_PR, sin_PR) in float32 for positions `[0, num_positions)`."""
    exponents_R = torch.arange(0, config.rotary_dim, 2, dtype=torch.float32) / config.rotary_dim
    frequencies_R = 1.0 / (config.rope.theta**exponents_R)
    scaling = config.rope.scaling
    table_scale = 1.0
    if isinstance(scaling, Llama3Scaling):
        frequencies_R = _stretch(frequencies_R, scaling)
    elif isinstance(scaling, YarnScaling):
        frequencies_R = _stretch_by_ramp(frequencies_R, scaling, theta=config.rope.theta)
        table_scale = scaling.table_scale
    angles_PR = torch.arange(num_positions, dtype=torch.float32)[:, None] * frequencies_R[None, :]
    return angles_PR.cos() * table_scale, angles_PR.sin() * table_scale


def _stretch(frequencies_R: torch.Tensor, scaling: Llama3Scaling) -> torch.Tensor:
    """Long wavelengths are divided by `factor`, short ones kept, those between interpolated."""
    turns_R = scaling.original_max_positions / (2 * math.pi / frequencies_R)
    share_kept_R = (turns_R - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    share_kept_R = share_kept_R.clamp(0.0, 1.0)
    return (1 - share_kept_R) * frequencies_R / scaling.factor + share_kept_R * frequencies_R


def _stretch_by_ramp(frequencies_R: torch.Tensor, scaling: YarnScaling, *, theta: float) -> torch.Tensor:
    """As `_stretch`, but interpolated evenly over the pairs between the two limits.

    Source: YaRN (arXiv 2309.00071), with the limits rounded outwards to whole pairs as its code does.
    """
    num_pairs = len(frequencies_R)

    def pair_with(turns: float) -> float:
        """The (fractional) pair that makes so many turns in the original context."""
        return num_pairs * math.log(scaling.original_max_positions / (turns * 2 * math.pi)) / math.log(theta)

    first = max(math.floor(pair_with(scaling.fast_turns)), 0)
    last = min(math.ceil(pair_with(scaling.slow_turns)), 2 * num_pairs - 1)
    share_stretched_R = (torch.arange(num_pairs, dtype=torch.float32) - first) / max(last - first, 0.001)
    share_stretched_R = share_stretched_R.clamp(0.0, 1.0)
    return frequencies_R / scaling.factor * share_stretched_R + frequencies_R * (1 - share_stretched_R)


def pairs_to_halves(x_TND: torch.Tensor) -> torch.Tensor:
    """From the form in which dimensions 2i and 2i + 1 turn together to the half-split one."""
    return torch.cat((x_TND[..., 0::2], x_TND[..., 1::2]), dim=-1)


def rotate(x_TND: torch.Tensor, cos_TR: torch.Tensor, sin_TR: torch.Tensor) -> torch.Tensor:
    first_TNR, second_TNR = x_TND.chunk(2, dim=-1)
    cos_T1R, sin_T1R = cos_TR[:, None, :].to(x_TND.dtype), sin_TR[:, None, :].to(x_TND.dtype)
    return torch.cat(
        (first_TNR * cos_T1R - second_TNR * sin_T1R, second_TNR * cos_T1R + first_TNR * sin_T1R),
        dim=-1,
    )
