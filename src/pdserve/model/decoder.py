"""The dense decoder (Llama, Qwen2, Qwen3) in plain torch: any device, any dtype, and the reference for faster paths.

Shape suffixes: T tokens of all sequences of a pass, one after another; E hidden; N query heads; H KV heads;
D head dimension; R = D/2 rotary pairs; F feed-forward; P positions;
Q = (N + 2H) * D, the packed projection; V vocabulary.
"""

from typing import Protocol

import torch
from torch import nn
from torch.nn import functional

from pdserve.model.config import ModelConfig
from pdserve.model.rope import rope_tables, rotate


class Attend(Protocol):
    """Attention over the KV cache, which belongs to the caller."""

    def __call__(self, layer_index: int, q_TND: torch.Tensor, k_THD: torch.Tensor, v_THD: torch.Tensor) -> torch.Tensor:
        """Append K and V of the pass's tokens, then attend: o_TND. Queries are not scaled yet."""
        ...


class OnLayer(Protocol):
    def __call__(self, layer_index: int) -> None:
        """Called after the attention output projection of a layer."""
        ...


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


class Attention(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        packed_dim = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        self.qkv = nn.Linear(config.hidden_dim, packed_dim, bias=config.has_qkv_bias)
        self.output = nn.Linear(config.num_heads * config.head_dim, config.hidden_dim, bias=False)
        self.q_norm = RmsNorm(config.head_dim, eps=config.norm_eps) if config.has_qk_norm else None
        self.k_norm = RmsNorm(config.head_dim, eps=config.norm_eps) if config.has_qk_norm else None

    def forward(
        self, x_TE: torch.Tensor, cos_TR: torch.Tensor, sin_TR: torch.Tensor, layer_index: int, attend: Attend
    ) -> torch.Tensor:
        num_tokens = x_TE.shape[0]
        qkv_TQ = self.qkv(x_TE).view(num_tokens, self.num_heads + 2 * self.num_kv_heads, self.head_dim)
        q_TND, k_THD, v_THD = qkv_TQ.split((self.num_heads, self.num_kv_heads, self.num_kv_heads), dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q_TND, k_THD = self.q_norm(q_TND), self.k_norm(k_THD)
        o_TND = attend(layer_index, rotate(q_TND, cos_TR, sin_TR), rotate(k_THD, cos_TR, sin_TR), v_THD)
        return self.output(o_TND.reshape(num_tokens, -1))


class FeedForward(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_up = nn.Linear(config.hidden_dim, 2 * config.ffn_dim, bias=False)
        self.down = nn.Linear(config.ffn_dim, config.hidden_dim, bias=False)

    def forward(self, x_TE: torch.Tensor) -> torch.Tensor:
        gate_TF, up_TF = self.gate_up(x_TE).chunk(2, dim=-1)
        return self.down(functional.silu(gate_TF) * up_TF)


class DecoderLayer(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = RmsNorm(config.hidden_dim, eps=config.norm_eps)
        self.attention = Attention(config)
        self.feed_forward_norm = RmsNorm(config.hidden_dim, eps=config.norm_eps)
        self.feed_forward = FeedForward(config)


class Decoder(nn.Module):
    """Requires: every position below `config.max_model_len`."""

    cos_PR: torch.Tensor
    sin_PR: torch.Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_dim)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_layers))
        self.final_norm = RmsNorm(config.hidden_dim, eps=config.norm_eps)
        self.lm_head = nn.Linear(config.hidden_dim, config.vocab_size, bias=False)
        if config.has_tied_embeddings:
            self.lm_head.weight = self.embedding.weight

    def decoder_layers(self) -> list[DecoderLayer]:
        return [layer for layer in self.layers if isinstance(layer, DecoderLayer)]

    def build_rope_tables(self, device: torch.device) -> None:
        """Made after loading: a model built on the meta device has no values to keep."""
        cos_PR, sin_PR = rope_tables(self.config, num_positions=self.config.max_model_len)
        self.register_buffer("cos_PR", cos_PR.to(device), persistent=False)
        self.register_buffer("sin_PR", sin_PR.to(device), persistent=False)

    def forward(
        self, token_ids_T: torch.Tensor, positions_T: torch.Tensor, attend: Attend, on_layer: OnLayer
    ) -> torch.Tensor:
        """Hidden states x_TE after the last layer, before the final norm."""
        x_TE = self.embedding(token_ids_T)
        cos_TR, sin_TR = self.cos_PR[positions_T], self.sin_PR[positions_T]
        for layer_index, layer in enumerate(self.decoder_layers()):
            x_TE = x_TE + layer.attention(layer.attention_norm(x_TE), cos_TR, sin_TR, layer_index, attend)
            on_layer(layer_index)
            x_TE = x_TE + layer.feed_forward(layer.feed_forward_norm(x_TE))
        return x_TE
