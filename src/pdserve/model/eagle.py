"""EAGLE heads: a layer or a few that continue the model's hidden states, which the model's own head turns into tokens.

Heads of EAGLE and EAGLE-2 are the same; the second only searches a tree with them.

Source: EAGLE (arXiv 2401.15077), section 4.1; names and order: `eagle/model/cnets1.py` of SafeAILab/EAGLE. The first
layer has no norm before its attention, and the embedding comes first in the input of `fc`.

Shape suffixes: T tokens of all sequences of a pass, one after another; E hidden; W chosen rows; V vocabulary.
"""

from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from pdserve.model.attention import AttentionCache
from pdserve.model.config import ModelConfig
from pdserve.model.decoder import LayerStack, OnLayer
from pdserve.model.draft_head_config import eagle3_refusal, eagle_config
from pdserve.model.parallel import SingleRank
from pdserve.model.products import Linear
from pdserve.model.tensors import CheckpointTensors
from pdserve.model.weight_rows import Rows, Sources
from pdserve.model.weights import assign_parameter, load_parameters

_PREFIX = "model."
"""Heads are published with and without it."""


class EagleHead(LayerStack):
    """See `DraftHeadModule`."""

    def __init__(self, config: ModelConfig, *, has_merge_bias: bool, has_first_norm: bool) -> None:
        super().__init__(config, SingleRank())
        self.merge = Linear(2 * config.hidden_dim, config.hidden_dim, has_bias=has_merge_bias)
        if not has_first_norm:
            self.decoder_layers()[0].register_module("attention_norm", nn.Identity())

    def forward(
        self,
        token_ids_T: torch.Tensor,
        previous_TE: torch.Tensor,
        positions_T: torch.Tensor,
        cache: AttentionCache,
        on_layer: OnLayer,
    ) -> torch.Tensor:
        merged_TE = self.merge(torch.cat((self.embedding(token_ids_T), previous_TE), dim=-1))
        return self.run_layers(merged_TE, positions_T, cache, on_layer)

    def logits(self, states_WE: torch.Tensor) -> torch.Tensor:
        """The states stand for hidden states after the model's final norm: there is none here."""
        return self.lm_head(states_WE)

    def sources(self) -> Sources:
        """Of the head's own parameters, without the embedding."""
        layers = self.layer_sources(f"layers.{i}." for i in range(self.config.num_layers))
        leaves = ("weight",) if self.merge.bias is None else ("weight", "bias")
        sources = {**layers, **{f"merge.{leaf}": (Rows(tensor=f"fc.{leaf}"),) for leaf in leaves}}
        parameters = dict(self.named_parameters())
        return {name: parts for name, parts in sources.items() if name in parameters}


def load_eagle(
    head_dir: Path, target_dir: Path, target_config: ModelConfig, *, dtype: torch.dtype, device: torch.device
) -> EagleHead:
    """The head, with the model's embedding where it has none of its own, and always with the model's head.

    Raises: `ConfigError` when the head is none for this model, is not implemented, or has a tensor of another shape.
    Cost: memory of a second embedding and a second head; of one where the model's are tied and the head has none.
    """
    config = eagle_config(head_dir, target_config)
    tensors = CheckpointTensors(head_dir, fp8_block=config.fp8_block)
    if tensors.has("d2t") or tensors.has("midlayer.self_attn.q_proj.weight"):
        raise eagle3_refusal(head_dir)

    def published(name: str) -> str:
        return _PREFIX + name if tensors.has(_PREFIX + name) else name

    with torch.device("meta"):
        head = EagleHead(
            config,
            has_merge_bias=tensors.has(published("fc.bias")),
            has_first_norm=tensors.has(published("layers.0.input_layernorm.weight")),
        )
    sources = {
        parameter: tuple(replace(rows, tensor=published(rows.tensor)) for rows in parts)
        for parameter, parts in head.sources().items()
    }
    load_parameters(head, sources, tensors, dtype=dtype, device=device)
    own = Rows(tensor=published("embed_tokens.weight"))
    if tensors.has(own.tensor):
        load_parameters(head, {"embedding.weight": (own,)}, tensors, dtype=dtype, device=device)
    _share_ends(head, target_dir, target_config, dtype=dtype, device=device)
    head.complete(device)
    return head.eval()


def _share_ends(
    head: EagleHead, target_dir: Path, target_config: ModelConfig, *, dtype: torch.dtype, device: torch.device
) -> None:
    """The model's embedding, unless the head has one by now, and the model's head."""
    tensors = CheckpointTensors(target_dir, fp8_block=target_config.fp8_block)
    target_embedding = Rows(tensor="model.embed_tokens.weight")
    if head.embedding.weight.is_meta:
        load_parameters(head, {"embedding.weight": (target_embedding,)}, tensors, dtype=dtype, device=device)
        if target_config.has_tied_embeddings:
            assign_parameter(head, "lm_head.weight", head.embedding.weight)
            return
    lm_head = target_embedding if target_config.has_tied_embeddings else Rows(tensor="lm_head.weight")
    load_parameters(head, {"lm_head.weight": (lm_head,)}, tensors, dtype=dtype, device=device)
