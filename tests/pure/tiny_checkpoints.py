"""Seeded checkpoints of a few thousand parameters, written by `transformers`, and what it computes with them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

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


CHECKPOINTS: dict[str, Callable[[], Any]] = {
    "llama": lambda: _llama(tie_word_embeddings=False),
    "llama-tied": lambda: _llama(tie_word_embeddings=True),
    "llama-llama3-rope": lambda: _llama(tie_word_embeddings=True, rope_scaling=_LLAMA3_SCALING),
    "qwen2": _qwen2,
    "qwen3": _qwen3,
}


def write_checkpoint(name: str, model_dir: Path) -> Any:
    """Saves the checkpoint and returns the model of `transformers`. Biases and norms are random too."""
    torch.manual_seed(sum(name.encode()))  # pyright: ignore[reportUnknownMemberType]
    model = CHECKPOINTS[name]().float().eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * (0.5 if "bias" in parameter_name else 0.1))
    model.save_pretrained(model_dir, safe_serialization=True)
    return model


def random_tokens(seed: int, num_tokens: int) -> list[int]:
    return [int(token_id) for token_id in np.random.default_rng(seed).integers(VOCAB_SIZE, size=num_tokens)]


def reference_logits(model: Any, token_ids: list[int]) -> torch.Tensor:
    """logits_TV by `transformers`."""
    with torch.no_grad():
        return model(torch.tensor([token_ids])).logits[0]
