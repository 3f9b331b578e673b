"""Multi-head latent attention (DeepSeek), cut by heads; the latents are whole on every rank.

What is cached of a token is `[latent, rotary key]`, normed and rotated, the same for all heads. Two ways lead to the
same result. A long chunk expands the keys and values of each head from the latents. For a few tokens the other way
round is cheaper: the expansion is absorbed into their queries and outputs, and they attend to the latents. With the
dimensions of DeepSeek-V3 the two break even at some 170 tokens.

A chunk of guesses is computed as single tokens are, so that its logits are theirs: in float32 on a CPU, with products
that do not depend on the shape, to the last bit (120 steps of the tiny DeepSeek, in chunks of 2 to 17 tokens). When
such chunks were expanded, no row had the same bits and logits were up to 1.6e-5 off.

Shape suffixes: T tokens of all sequences of a pass, one after another; Q tokens of one sequence; C its cached tokens,
with the Q last; E hidden; N heads of this rank; D query head dimension; V value dimension; L cached dimensions of a
token; R rotary pairs; O attention output columns of all ranks.
"""

import torch
from torch import nn

from pdserve.model.attention import SHORT_CHUNK, AttentionCache, attend_causally
from pdserve.model.config import ModelConfig
from pdserve.model.cuts import Cuts
from pdserve.model.latent_config import LatentConfig
from pdserve.model.norm import RmsNorm
from pdserve.model.parallel import Communicator, cut_heads
from pdserve.model.products import HeadLinear, Linear
from pdserve.model.rope import pairs_to_halves, rotate
from pdserve.model.rope_config import YarnScaling
from pdserve.model.weight_rows import Rows, Sources

_NORM_EPS = 1e-6
"""Of the norms of compressed queries and latents, whatever the config says of the others. Source: DeepSeek's code."""


class LatentAttention(nn.Module):
    """Returns all hidden columns on every rank."""

    def __init__(self, config: ModelConfig, latent: LatentConfig, cuts: Cuts, communicator: Communicator) -> None:
        super().__init__()
        self.latent, self._cuts, self._communicator = latent, cuts, communicator
        self._head_dim = config.head_dim
        self._expanded_dim = latent.plain_dim + latent.value_dim
        self._queries = cut_heads(config.num_heads, columns_per_head=config.head_dim, communicator=communicator)
        self._expanded = cut_heads(config.num_heads, columns_per_head=self._expanded_dim, communicator=communicator)
        self.num_heads = config.num_heads // communicator.num_ranks
        scaling = config.rope.scaling
        self.softmax_scale = config.head_dim**-0.5 * (scaling.softmax_scale if isinstance(scaling, YarnScaling) else 1)
        self.q_down = Linear(config.hidden_dim, latent.q_rank) if latent.q_rank is not None else None
        self.q_norm = RmsNorm(latent.q_rank, eps=_NORM_EPS) if latent.q_rank is not None else None
        self.q_up = Linear(latent.q_rank or config.hidden_dim, len(self._queries.ours))
        self.kv_down = Linear(config.hidden_dim, latent.cache_dim)
        self.kv_norm = RmsNorm(latent.kv_rank, eps=_NORM_EPS)
        self.kv_up = Linear(latent.kv_rank, len(self._expanded.ours))
        self.absorbed_key = HeadLinear()
        self.absorbed_value = HeadLinear()
        self.output = Linear(cuts.heads.total, len(cuts.hidden.ours))

    def absorb(self) -> None:
        """Derive the products of short chunks from the loaded `kv_up`, without a copy."""
        weight = self.kv_up.weight.detach().view(self.num_heads, self._expanded_dim, self.latent.kv_rank)
        self.absorbed_key.set_weight(weight[:, : self.latent.plain_dim].transpose(1, 2))
        self.absorbed_value.set_weight(weight[:, self.latent.plain_dim :])

    def forward(
        self, x_TE: torch.Tensor, cos_TR: torch.Tensor, sin_TR: torch.Tensor, layer_index: int, cache: AttentionCache
    ) -> torch.Tensor:
        num_tokens = x_TE.shape[0]
        compressed = x_TE if self.q_down is None or self.q_norm is None else self.q_norm(self.q_down(x_TE))
        q_TND = self.q_up(compressed).view(num_tokens, self.num_heads, self._head_dim)
        plain_dim, kv_rank = self.latent.plain_dim, self.latent.kv_rank
        q_rotary = self._rotate(q_TND[:, :, plain_dim:], cos_TR, sin_TR)
        q_TND = torch.cat((q_TND[:, :, :plain_dim], q_rotary), dim=-1)
        latents_TL = self.kv_down(x_TE)
        k_rotary = self._rotate(latents_TL[:, None, kv_rank:], cos_TR, sin_TR)[:, 0]
        latents_TL = torch.cat((self.kv_norm(latents_TL[:, :kv_rank]), k_rotary), dim=-1)
        o_TNV = cache.attend_latents(layer_index, q_TND, latents_TL, self.attend_one)
        o_TO = self._communicator.gather_columns(o_TNV.reshape(num_tokens, -1), self._cuts.heads.widths)
        return self._communicator.gather_columns(self.output(o_TO), self._cuts.hidden.widths)

    def _rotate(self, x_TND: torch.Tensor, cos_TR: torch.Tensor, sin_TR: torch.Tensor) -> torch.Tensor:
        return rotate(pairs_to_halves(x_TND) if self.latent.has_rotary_pairs else x_TND, cos_TR, sin_TR)

    def attend_one(self, q_QND: torch.Tensor, latents_CL: torch.Tensor) -> torch.Tensor:
        """See `AttendToLatents`."""
        is_short = len(q_QND) <= SHORT_CHUNK
        return self._attend_absorbed(q_QND, latents_CL) if is_short else self._attend_expanded(q_QND, latents_CL)

    def _attend_absorbed(self, q_QND: torch.Tensor, latents_CL: torch.Tensor) -> torch.Tensor:
        """Scores against latents equal scores against expanded keys: q (W c) = (q W) c. So with the values."""
        plain_dim = self.latent.plain_dim
        q_QNL = torch.cat((self.absorbed_key(q_QND[:, :, :plain_dim]), q_QND[:, :, plain_dim:]), dim=-1)
        latents_C1L = latents_CL[:, None]
        o_QNL = attend_causally(q_QNL, latents_C1L, latents_C1L, scale=self.softmax_scale)
        return self.absorbed_value(o_QNL[:, :, : self.latent.kv_rank])

    def _attend_expanded(self, q_QND: torch.Tensor, latents_CL: torch.Tensor) -> torch.Tensor:
        plain_dim, kv_rank = self.latent.plain_dim, self.latent.kv_rank
        expanded = self.kv_up(latents_CL[:, :kv_rank]).view(len(latents_CL), self.num_heads, self._expanded_dim)
        rotary = latents_CL[:, None, kv_rank:].expand(-1, self.num_heads, -1)
        k_CND = torch.cat((expanded[:, :, :plain_dim], rotary), dim=-1)
        return attend_causally(q_QND, k_CND, expanded[:, :, plain_dim:], scale=self.softmax_scale)

    def sources(self) -> Sources:
        queries, expanded, hidden = self._queries, self._expanded, self._cuts.hidden
        sources = {
            "kv_down.weight": (Rows(tensor="kv_a_proj_with_mqa.weight"),),
            "kv_norm.weight": (Rows(tensor="kv_a_layernorm.weight"),),
            "kv_up.weight": (Rows(tensor="kv_b_proj.weight", cut=expanded),),
            "output.weight": (Rows(tensor="o_proj.weight", cut=hidden),),
        }
        if self.q_down is None:
            return sources | {"q_up.weight": (Rows(tensor="q_proj.weight", cut=queries),)}
        return sources | {
            "q_down.weight": (Rows(tensor="q_a_proj.weight"),),
            "q_norm.weight": (Rows(tensor="q_a_layernorm.weight"),),
            "q_up.weight": (Rows(tensor="q_b_proj.weight", cut=queries),),
        }
