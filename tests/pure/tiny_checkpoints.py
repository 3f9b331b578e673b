"""Seeded checkpoints of a few thousand parameters, written by `transformers`, and what it computes with them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file  # pyright: ignore[reportUnknownVariableType]

Tensors = dict[str, torch.Tensor]

VOCAB_SIZE = 131
NUM_LAYERS = 3

_DIMENSIONS: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rope_theta": 10_000.0,
    "initializer_range": 0.3,
}
_LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def _dimensions(**changes: Any) -> dict[str, Any]:
    return {**_DIMENSIONS, **changes}


def _llama(**changes: Any) -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**_dimensions(head_dim=16, **changes)))


def _qwen2() -> Any:
    dimensions = _dimensions(num_attention_heads=3, num_key_value_heads=1, tie_word_embeddings=True)
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**dimensions))


def _qwen3() -> Any:
    return transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(**_dimensions(head_dim=32, tie_word_embeddings=False))
    )


def _qwen3_moe(**changes: Any) -> Any:
    experts = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
    fields = _dimensions(num_attention_heads=4, head_dim=16, tie_word_embeddings=False, **experts, **changes)
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**fields))


_LATENT: dict[str, Any] = {
    "num_key_value_heads": 6,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "rms_norm_eps": 1e-3,
    "tie_word_embeddings": False,
}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 32.0}


def _deepseek_v2(**changes: Any) -> Any:
    return transformers.DeepseekV2ForCausalLM(transformers.DeepseekV2Config(**_dimensions(**_LATENT, **changes)))


def _deepseek_v3(**changes: Any) -> Any:
    routing = {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}
    fields = _dimensions(**{**_LATENT, "q_lora_rank": 28, **routing, **changes})
    return transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**fields))


CHECKPOINTS: dict[str, Callable[[], Any]] = {
    "llama": lambda: _llama(tie_word_embeddings=False),
    "llama-tied": lambda: _llama(tie_word_embeddings=True),
    "llama-llama3-rope": lambda: _llama(tie_word_embeddings=True, rope_scaling=_LLAMA3_SCALING),
    "llama-yarn": lambda: _llama(tie_word_embeddings=True, rope_scaling=_YARN),
    "qwen2": _qwen2,
    "qwen3": _qwen3,
}
MIXTURES: dict[str, Callable[[], Any]] = {
    "qwen3-moe": lambda: _qwen3_moe(norm_topk_prob=True),
    "qwen3-moe-some-dense": lambda: _qwen3_moe(decoder_sparse_step=2),
    "qwen3-moe-first-dense": lambda: _qwen3_moe(mlp_only_layers=[0], norm_topk_prob=True),
    "deepseek-v2": lambda: _deepseek_v2(
        q_lora_rank=28, topk_method="group_limited_greedy", n_group=4, topk_group=2, routed_scaling_factor=1.7
    ),
    "deepseek-v2-lite": lambda: _deepseek_v2(q_lora_rank=None, rope_scaling=_YARN),
    "deepseek-v3": _deepseek_v3,
    "deepseek-v3-yarn": lambda: _deepseek_v3(rope_scaling=_YARN | {"mscale": 0.7, "mscale_all_dim": 1.3}),
    "deepseek-v3-halves": lambda: _deepseek_v3(rope_interleave=False, norm_topk_prob=False),
}
"""With experts, and DeepSeek's with latent attention too."""


OTHERS: dict[str, Callable[[], Any]] = {
    "deepseek-v2-mscale": lambda: _deepseek_v2(
        q_lora_rank=28, rope_scaling=_YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}
    ),
}
"""With settings that `transformers` does not honour."""


def write_checkpoint(name: str, model_dir: Path) -> Any:
    """Saves the checkpoint and returns the model of `transformers`. Biases and norms are random too."""
    model = _seeded(name, (CHECKPOINTS | MIXTURES | OTHERS)[name])
    model.save_pretrained(model_dir, safe_serialization=True)
    return model


def write_mtp_checkpoint(model_dir: Path, *, shares_ends: bool = False, **changes: Any) -> Any:
    """A DeepSeek-V3 checkpoint with an MTP module; returns the module's layer as a model of `transformers`.

    The model takes embeddings and has no norm at its end. The module shares the model's embedding and head, or has its
    own, as DeepSeek's checkpoint has.
    """
    model = _seeded("mtp", lambda: _deepseek_v3(num_hidden_layers=NUM_LAYERS + 1, **changes))
    model.save_pretrained(model_dir, safe_serialization=True)
    change_config(model_dir, num_hidden_layers=NUM_LAYERS, num_nextn_predict_layers=1)
    dim = model.config.hidden_size
    tensors = {
        "enorm.weight": 1 + torch.randn(dim) * 0.1,
        "hnorm.weight": 1 + torch.randn(dim) * 0.1,
        "eh_proj.weight": torch.randn(dim, 2 * dim) * 0.2,
        "shared_head.norm.weight": 1 + torch.randn(dim) * 0.1,
    }
    if not shares_ends:
        tensors["embed_tokens.weight"] = torch.randn(VOCAB_SIZE, dim)
        tensors["shared_head.head.weight"] = torch.randn(VOCAB_SIZE, dim)
    prefix = f"model.layers.{NUM_LAYERS}."
    save_file({prefix + name: tensor for name, tensor in tensors.items()}, model_dir / "mtp.safetensors")
    return _last_layers(model, 1)


def write_eagle_head(
    head_dir: Path,
    *,
    prefix: str = "",
    has_bias: bool = False,
    has_first_norm: bool = False,
    has_embedding: bool = False,
    num_layers: int = 1,
    has_qkv_bias: bool = False,
) -> Any:
    """An EAGLE head for the checkpoints of Llama; returns its layers as a model of `transformers`, as above."""
    create = _qwen2 if has_qkv_bias else lambda: _llama(num_hidden_layers=num_layers)
    layers = _last_layers(_seeded("eagle", create), num_layers)
    dim = layers.config.hidden_size
    tensors = {"fc.weight": torch.randn(dim, 2 * dim) * 0.2}
    if has_bias:
        tensors["fc.bias"] = torch.randn(dim)
    if has_embedding:
        tensors["embed_tokens.weight"] = torch.randn(VOCAB_SIZE, dim)
    if not has_first_norm:
        layers.layers[0].input_layernorm = torch.nn.Identity()
    tensors |= {name: tensor for name, tensor in layers.state_dict().items() if name.startswith("layers.")}
    save_file({prefix + name: tensor for name, tensor in tensors.items()}, head_dir / "model.safetensors")
    fields = layers.config.to_dict() | {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": num_layers}
    if has_qkv_bias:
        fields |= {"qkv_bias": True}
    (head_dir / "config.json").write_text(json.dumps(fields))
    return layers


def _last_layers(model: Any, num_layers: int) -> Any:
    layers = model.model
    layers.layers = layers.layers[-num_layers:]
    for layer_index, layer in enumerate(layers.layers):
        layer.self_attn.layer_idx = layer_index
    layers.config.num_hidden_layers = num_layers
    layers.norm = torch.nn.Identity()
    return layers


def change_config(model_dir: Path, **changes: object) -> None:
    path = model_dir / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def read_tensors(model_dir: Path) -> Tensors:
    tensors: Tensors = {}
    for path in model_dir.glob("*.safetensors"):
        tensors |= load_file(path)
    return tensors


def _seeded(name: str, create: Callable[[], Any]) -> Any:
    torch.manual_seed(sum(name.encode()))  # pyright: ignore[reportUnknownMemberType]
    model = create().float().eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * (0.5 if "bias" in parameter_name else 0.1))
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.rand_like(buffer))
    return model


def random_tokens(seed: int, num_tokens: int) -> list[int]:
    return [int(token_id) for token_id in np.random.default_rng(seed).integers(VOCAB_SIZE, size=num_tokens)]


def reference_logits(model: Any, token_ids: list[int]) -> torch.Tensor:
    """logits_TV by `transformers`."""
    with torch.no_grad():
        return model(torch.tensor([token_ids])).logits[0]
