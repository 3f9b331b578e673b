"""Grouped-query attention, cut by heads, and the port to the KV cache that every attention goes through.

Shape suffixes: T tokens of all sequences of a pass, one after another; Q tokens of one sequence; C its cached tokens,
with the Q last; E hidden; N query heads and H KV heads of this rank; X = N + 2H packed heads; D head dimension; V value
dimension; R rotary pairs; L latent and rotary key of one token; O attention output columns of all ranks.
"""

from typing import Protocol

import torch
from torch import nn
from torch.nn import functional

from pdserve.config.speculation import MAX_NUM_DRAFT_TOKENS
from pdserve.model.config import ModelConfig
from pdserve.model.cuts import Cuts
from pdserve.model.norm import RmsNorm
from pdserve.model.parallel import Communicator
from pdserve.model.products import Linear
from pdserve.model.rope import rotate
from pdserve.model.weight_rows import Rows, Sources

SHORT_CHUNK = MAX_NUM_DRAFT_TOKENS + 1
"""Tokens up to which a chunk may be guesses to verify; such chunks attend as so many chunks of one token would."""


class AttendToLatents(Protocol):
    def __call__(self, q_QND: torch.Tensor, latents_CL: torch.Tensor) -> torch.Tensor:
        """o_QNV of the last Q of C tokens; causal."""
        ...


class AttentionCache(Protocol):
    """Attention over the KV cache, which belongs to the caller."""

    def attend(self, layer_index: int, q_TND: torch.Tensor, k_THD: torch.Tensor, v_THD: torch.Tensor) -> torch.Tensor:
        """Append K and V of the pass's tokens, then attend: o_TND. Queries are not scaled yet."""
        ...

    def attend_latents(
        self, layer_index: int, q_TND: torch.Tensor, latents_TL: torch.Tensor, attend_one: AttendToLatents
    ) -> torch.Tensor:
        """Append the latents of the pass's tokens, then have `attend_one` attend sequence by sequence: o_TNV."""
        ...


def attend_causally(
    q_QND: torch.Tensor, k_CHD: torch.Tensor, v_CHV: torch.Tensor, *, scale: float | None = None
) -> torch.Tensor:
    """o_QNV. Without a scale: one over the root of D.

    Heads are spread and padded to one dimension, because torch's kernel that computes head by head takes nothing else:
    so what a head comes to does not depend on how many heads its rank has. The rows of a short chunk attend one by one:
    so what a token comes to does not depend on the guesses beside it.
    """
    num_heads, value_dim = q_QND.shape[1], v_CHV.shape[2]
    dim = max(q_QND.shape[2], value_dim)

    def as_heads(x: torch.Tensor) -> torch.Tensor:
        padded = functional.pad(x, (0, dim - x.shape[2]))
        return padded.repeat_interleave(num_heads // x.shape[1], dim=1).transpose(0, 1)[None]

    num_new, num_cached = len(q_QND), len(k_CHD)
    q_1NQD, k_1NCD, v_1NCD = as_heads(q_QND), as_heads(k_CHD), as_heads(v_CHV)
    softmax_scale = q_QND.shape[2] ** -0.5 if scale is None else scale
    if num_new <= SHORT_CHUNK:
        rows: list[torch.Tensor] = []
        for row in range(num_new):
            seen = slice(num_cached - num_new + row + 1)
            row_1N1D = q_1NQD[:, :, row : row + 1]
            rows.append(_attend(row_1N1D, k_1NCD[:, :, seen], v_1NCD[:, :, seen], scale=softmax_scale))
        o_1NQD = torch.cat(rows, dim=2)
    else:
        last_seen_Q = torch.arange(num_cached - num_new, num_cached, device=q_QND.device)
        mask_QC = torch.arange(num_cached, device=q_QND.device)[None, :] <= last_seen_Q[:, None]
        o_1NQD = _attend(q_1NQD, k_1NCD, v_1NCD, scale=softmax_scale, mask_QC=mask_QC)
    return o_1NQD[0, :, :, :value_dim].transpose(0, 1)


def _attend(
    q_1NQD: torch.Tensor,
    k_1NCD: torch.Tensor,
    v_1NCD: torch.Tensor,
    *,
    scale: float,
    mask_QC: torch.Tensor | None = None,
) -> torch.Tensor:
    """o_1NQD. Without a mask each row sees all."""
    return functional.scaled_dot_product_attention(q_1NQD, k_1NCD, v_1NCD, attn_mask=mask_QC, scale=scale)


class GroupedAttention(nn.Module):
    """Returns all hidden columns on every rank."""

    def __init__(self, config: ModelConfig, cuts: Cuts, communicator: Communicator) -> None:
        super().__init__()
        self._cuts, self._communicator = cuts, communicator
        self.head_dim, self.has_qkv_bias = config.head_dim, config.has_qkv_bias
        self.num_heads = len(cuts.heads.ours) // self.head_dim
        self.num_kv_heads = len(cuts.kv_heads.ours) // self.head_dim
        packed_dim = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        self.qkv = Linear(config.hidden_dim, packed_dim, has_bias=config.has_qkv_bias)
        self.output = Linear(cuts.heads.total, len(cuts.hidden.ours))
        self.q_norm = RmsNorm(config.head_dim, eps=config.norm_eps) if config.has_qk_norm else None
        self.k_norm = RmsNorm(config.head_dim, eps=config.norm_eps) if config.has_qk_norm else None

    def forward(
        self, x_TE: torch.Tensor, cos_TR: torch.Tensor, sin_TR: torch.Tensor, layer_index: int, cache: AttentionCache
    ) -> torch.Tensor:
        num_tokens = x_TE.shape[0]
        heads_TXD = self.qkv(x_TE).view(num_tokens, self.num_heads + 2 * self.num_kv_heads, self.head_dim)
        q_TND, k_THD, v_THD = heads_TXD.split((self.num_heads, self.num_kv_heads, self.num_kv_heads), dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q_TND, k_THD = self.q_norm(q_TND), self.k_norm(k_THD)
        o_TND = cache.attend(layer_index, rotate(q_TND, cos_TR, sin_TR), rotate(k_THD, cos_TR, sin_TR), v_THD)
        o_TO = self._communicator.gather_columns(o_TND.reshape(num_tokens, -1), self._cuts.heads.widths)
        return self._communicator.gather_columns(self.output(o_TO), self._cuts.hidden.widths)

    def sources(self) -> Sources:
        heads, kv_heads = self._cuts.heads, self._cuts.kv_heads
        sources: dict[str, tuple[Rows, ...]] = {
            f"qkv.{leaf}": (
                Rows(tensor=f"q_proj.{leaf}", cut=heads),
                Rows(tensor=f"k_proj.{leaf}", cut=kv_heads),
                Rows(tensor=f"v_proj.{leaf}", cut=kv_heads),
            )
            for leaf in (("weight", "bias") if self.has_qkv_bias else ("weight",))
        }
        sources["output.weight"] = (Rows(tensor="o_proj.weight", cut=self._cuts.hidden),)
        if self.q_norm is not None:
            sources["q_norm.weight"] = (Rows(tensor="q_norm.weight"),)
            sources["k_norm.weight"] = (Rows(tensor="k_norm.weight"),)
        return sources
