"""A decoder of any architecture in plain torch, or one rank's part of it: any device, any dtype.

Every rank calls the same gathers in the same order, and has the same hidden states between layers.

Shape suffixes: T tokens of all sequences of a pass, one after another; E hidden; R rotary pairs; P positions;
W chosen rows; V vocabulary.
"""

from collections.abc import Iterable
from typing import Protocol

import torch
from torch import nn

from pdserve.model.attention import AttentionCache, GroupedAttention
from pdserve.model.config import ModelConfig
from pdserve.model.cuts import Cuts
from pdserve.model.experts import Experts
from pdserve.model.feed_forward import FeedForward
from pdserve.model.latent_attention import LatentAttention
from pdserve.model.norm import RmsNorm
from pdserve.model.parallel import Communicator, SingleRank
from pdserve.model.products import Linear
from pdserve.model.rope import rope_tables
from pdserve.model.weight_rows import Rows, Sources, nested


class OnLayer(Protocol):
    def __call__(self, layer_index: int) -> None:
        """Called after the attention output projection of a layer is gathered: all ranks have cached its KV."""
        ...


class DecoderLayer(nn.Module):
    attention: GroupedAttention | LatentAttention
    feed_forward: FeedForward | Experts

    def __init__(self, config: ModelConfig, layer_index: int, cuts: Cuts, communicator: Communicator) -> None:
        super().__init__()
        dim, eps = config.hidden_dim, config.norm_eps
        self.attention_norm = RmsNorm(dim, eps=eps)
        if config.latent is not None:
            self.attention = LatentAttention(config, config.latent, cuts, communicator)
        else:
            self.attention = GroupedAttention(config, cuts, communicator)
        self.feed_forward_norm = RmsNorm(dim, eps=eps)
        if config.experts is not None and layer_index in config.experts.layers:
            self.feed_forward = Experts(config.experts, hidden_dim=dim, hidden=cuts.hidden, communicator=communicator)
        else:
            self.feed_forward = FeedForward(dim, ffn=cuts.ffn, hidden=cuts.hidden, communicator=communicator)

    def sources(self) -> Sources:
        return {
            "attention_norm.weight": (Rows(tensor="input_layernorm.weight"),),
            **nested("attention.", "self_attn.", self.attention.sources()),
            "feed_forward_norm.weight": (Rows(tensor="post_attention_layernorm.weight"),),
            **nested("feed_forward.", "mlp.", self.feed_forward.sources()),
        }


class LayerStack(nn.Module):
    """An embedding, layers and a head over the vocabulary: what whole models and draft heads have in common.

    Requires: every position below `config.max_model_len`.
    """

    cos_PR: torch.Tensor
    sin_PR: torch.Tensor

    def __init__(self, config: ModelConfig, communicator: Communicator) -> None:
        super().__init__()
        self.config, self.communicator = config, communicator
        cuts = self.cuts = Cuts.of(config, communicator)
        # Given a weight, it does not draw one, which on the meta device would load torch's compiler: 1.5 s of CPU time.
        weight_VE = torch.empty(config.vocab_size, config.hidden_dim)
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_dim, _weight=weight_VE)
        self.layers = nn.ModuleList(
            DecoderLayer(config, layer_index, cuts, communicator) for layer_index in range(config.num_layers)
        )
        self.lm_head = Linear(config.hidden_dim, len(cuts.vocab.ours))

    def decoder_layers(self) -> list[DecoderLayer]:
        return [layer for layer in self.layers if isinstance(layer, DecoderLayer)]

    def complete(self, device: torch.device) -> None:
        """Make what no checkpoint has, once the parameters are loaded."""
        cos_PR, sin_PR = rope_tables(self.config, num_positions=self.config.max_model_len)
        self.register_buffer("cos_PR", cos_PR.to(device), persistent=False)
        self.register_buffer("sin_PR", sin_PR.to(device), persistent=False)
        for layer in self.decoder_layers():
            if isinstance(layer.attention, LatentAttention):
                layer.attention.absorb()

    def run_layers(
        self, x_TE: torch.Tensor, positions_T: torch.Tensor, cache: AttentionCache, on_layer: OnLayer
    ) -> torch.Tensor:
        """x_TE after the last layer."""
        cos_TR, sin_TR = self.cos_PR[positions_T], self.sin_PR[positions_T]
        for layer_index, layer in enumerate(self.decoder_layers()):
            x_TE = x_TE + layer.attention(layer.attention_norm(x_TE), cos_TR, sin_TR, layer_index, cache)
            on_layer(layer_index)
            x_TE = x_TE + layer.feed_forward(layer.feed_forward_norm(x_TE))
        return x_TE

    def layer_sources(self, tensor_prefixes: Iterable[str]) -> Sources:
        """Of the layers, each under its own prefix."""
        sources: dict[str, tuple[Rows, ...]] = {}
        for layer_index, (layer, prefix) in enumerate(zip(self.decoder_layers(), tensor_prefixes, strict=True)):
            sources |= nested(f"layers.{layer_index}.", prefix, layer.sources())
        return sources


class Decoder(LayerStack):
    def __init__(self, config: ModelConfig, communicator: Communicator | None = None) -> None:
        super().__init__(config, SingleRank() if communicator is None else communicator)
        self.final_norm = RmsNorm(config.hidden_dim, eps=config.norm_eps)

    def sources(self) -> Sources:
        """Of all parameters, but a tied head: that is rows of the embedding."""
        sources: dict[str, tuple[Rows, ...]] = {
            "embedding.weight": (Rows(tensor="model.embed_tokens.weight"),),
            "final_norm.weight": (Rows(tensor="model.norm.weight"),),
            **self.layer_sources(f"model.layers.{i}." for i in range(self.config.num_layers)),
        }
        if not self.config.has_tied_embeddings:
            sources["lm_head.weight"] = (Rows(tensor="lm_head.weight", cut=self.cuts.vocab),)
        return sources

    def forward(
        self, token_ids_T: torch.Tensor, positions_T: torch.Tensor, cache: AttentionCache, on_layer: OnLayer
    ) -> torch.Tensor:
        """Hidden states x_TE after the last layer, before the final norm."""
        return self.run_layers(self.embedding(token_ids_T), positions_T, cache, on_layer)

    def logits(self, normed_WE: torch.Tensor) -> torch.Tensor:
        """logits_WV over the whole vocabulary. Every rank must ask."""
        return self.communicator.gather_columns(self.lm_head(normed_WE), self.cuts.vocab.widths)
