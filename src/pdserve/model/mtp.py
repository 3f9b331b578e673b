"""The multi-token prediction (MTP) module of DeepSeek-V3 checkpoints: a layer more, to guess the next token but one.

Only the first module is used, for each guess again: with its own output in place of the model's hidden state.

Source: DeepSeek-V3 (arXiv 2412.19437), section 2.2, equations 21 to 23; names and places of the weights:
README_WEIGHTS.md of deepseek-ai/DeepSeek-V3. The paper writes the hidden state first in the projection's input, the
weights have the embedding first (`eh_proj`), as vLLM and SGLang feed it. They also feed the model's hidden state after
its final norm, where the paper does not say which.

Shape suffixes: T tokens of all sequences of a pass, one after another; E hidden; W chosen rows; V vocabulary.
"""

from pathlib import Path

import torch

from pdserve.errors import ConfigError
from pdserve.model.attention import AttentionCache
from pdserve.model.config import ModelConfig
from pdserve.model.decoder import LayerStack, OnLayer
from pdserve.model.draft_head_config import mtp_config
from pdserve.model.norm import RmsNorm
from pdserve.model.parallel import SingleRank
from pdserve.model.products import Linear
from pdserve.model.tensors import CheckpointTensors
from pdserve.model.weight_rows import Rows, Sources
from pdserve.model.weights import load_parameters


class MtpModule(LayerStack):
    """See `DraftHeadModule`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, SingleRank())
        dim, eps = config.hidden_dim, config.norm_eps
        self.embedding_norm = RmsNorm(dim, eps=eps)
        self.previous_norm = RmsNorm(dim, eps=eps)
        self.merge = Linear(2 * dim, dim)
        self.head_norm = RmsNorm(dim, eps=eps)

    def forward(
        self,
        token_ids_T: torch.Tensor,
        previous_TE: torch.Tensor,
        positions_T: torch.Tensor,
        cache: AttentionCache,
        on_layer: OnLayer,
    ) -> torch.Tensor:
        embedded_TE = self.embedding_norm(self.embedding(token_ids_T))
        merged_TE = self.merge(torch.cat((embedded_TE, self.previous_norm(previous_TE)), dim=-1))
        return self.run_layers(merged_TE, positions_T, cache, on_layer)

    def logits(self, states_WE: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.head_norm(states_WE))

    def sources(self, prefix: str, *, embedding: str, lm_head: str) -> Sources:
        """Under the prefix of the module's layer; the embedding and the head may be the model's own."""
        return {
            "embedding.weight": (Rows(tensor=embedding),),
            "embedding_norm.weight": (Rows(tensor=f"{prefix}enorm.weight"),),
            "previous_norm.weight": (Rows(tensor=f"{prefix}hnorm.weight"),),
            "merge.weight": (Rows(tensor=f"{prefix}eh_proj.weight"),),
            **self.layer_sources([prefix]),
            "head_norm.weight": (Rows(tensor=f"{prefix}shared_head.norm.weight"),),
            "lm_head.weight": (Rows(tensor=lm_head),),
        }


def load_mtp(model_dir: Path, target_config: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> MtpModule:
    """`target_config` is that of the whole model in `model_dir`.

    Raises: `ConfigError` when the checkpoint has no MTP module, or a tensor of another shape.
    Cost: memory of a second embedding and a second head.
    """
    with torch.device("meta"):
        module = MtpModule(mtp_config(model_dir))
    tensors = CheckpointTensors(model_dir, fp8_block=target_config.fp8_block)
    prefix = f"model.layers.{target_config.num_layers}."
    if not tensors.has(f"{prefix}eh_proj.weight"):
        raise ConfigError(
            f"{model_dir}: config.json names an MTP module, but the weights have none ({prefix}eh_proj.weight): "
            "take the original checkpoint, or speculate with ngram"
        )

    def own_or(name: str, shared: str) -> str:
        return prefix + name if tensors.has(prefix + name) else shared

    embedding = own_or("embed_tokens.weight", "model.embed_tokens.weight")
    shared_head = "model.embed_tokens.weight" if target_config.has_tied_embeddings else "lm_head.weight"
    sources = module.sources(prefix, embedding=embedding, lm_head=own_or("shared_head.head.weight", shared_head))
    load_parameters(module, sources, tensors, dtype=dtype, device=device)
    module.complete(device)
    return module.eval()
