"""Tiny models of large architectures, with random weights, for checks of whole deployments.

Their text is nonsense, but it comes from real computations: latent attention, experts, routers, all as in the large
models. `transformers` writes them, so that it can be asked for the same tokens. One of them has heads that guess some
of its text: see `tiny_heads.py`.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file  # pyright: ignore[reportUnknownVariableType]

from pdserve.bench.tiny_heads import Array, HiddenStates, fit_eagle, fit_mtp, follow_two_tokens, parameters_of
from pdserve.errors import ConfigError
from pdserve.model import smollm2
from pdserve.model.config import read_config
from pdserve.model.prepared import prepared_dir

_TRANSFORMERS = "transformers>=4.57"

_RECIPE_VERSION = 2
"""Counts changes of what is written; an older directory is made again."""

_SEED = 11

_COMMON: Mapping[str, object] = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "moe_intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 2048,
    "initializer_range": 0.15,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _TinyModel:
    architecture: str
    """Of `transformers`: `XForCausalLM`, made from an `XConfig`."""
    fields: Mapping[str, object]
    has_mtp: bool = False


_DEEPSEEK: Mapping[str, object] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 1,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 512,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
    },
}
_MODELS: Mapping[str, _TinyModel] = {
    "tiny-deepseek": _TinyModel(architecture="DeepseekV3", fields=_DEEPSEEK),
    "tiny-deepseek-mtp": _TinyModel(
        architecture="DeepseekV3", fields={**_DEEPSEEK, "num_nextn_predict_layers": 1}, has_mtp=True
    ),
    "tiny-qwen3-moe": _TinyModel(
        architecture="Qwen3Moe",
        fields={"num_key_value_heads": 2, "head_dim": 32, "num_experts": 8, "norm_topk_prob": True},
    ),
}

TINY_NAMES = tuple(_MODELS)

TINY_EAGLE = "tiny-deepseek-eagle"
TINY_EAGLE_MODEL = "tiny-deepseek-mtp"
"""An EAGLE head, and the model that it guesses for."""

_EAGLE_FIELDS: Mapping[str, object] = {
    "hidden_size": _COMMON["hidden_size"],
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": _COMMON["max_position_embeddings"],
    "initializer_range": 0.05,
    "tie_word_embeddings": False,
}


def prepare_tiny(name: str) -> Path:
    """The directory of one of `TINY_NAMES`, made if it is not there yet, with the default model's tokenizer.

    Raises: `ConfigError` when the name is unknown, `transformers` is not installed or the disk is full.
    Cost: some seconds the first time.
    """
    model = _MODELS.get(name)
    if model is None:
        raise ConfigError(f"{name!r} is no tiny model; known are {', '.join(TINY_NAMES)}")
    recipe = {"architecture": model.architecture, "version": _RECIPE_VERSION, "seed": _SEED, **_COMMON, **model.fields}
    return prepared_dir(name, recipe=recipe, fill=_filler(model))


def prepare_tiny_eagle() -> Path:
    """The directory of `TINY_EAGLE`; makes `TINY_EAGLE_MODEL` too, where it is not there yet.

    Raises: `ConfigError` as `prepare_tiny`.
    Cost: some seconds the first time.
    """
    target_dir = prepare_tiny(TINY_EAGLE_MODEL)
    recipe = {"version": _RECIPE_VERSION, "seed": _SEED, **_EAGLE_FIELDS}
    return prepared_dir(TINY_EAGLE, recipe=recipe, fill=lambda head_dir: _write_eagle(head_dir, target_dir))


def _filler(model: _TinyModel) -> Callable[[Path], None]:
    def fill(model_dir: Path) -> None:
        transformers = _import_transformers()
        tokenizer_dir = smollm2.prepare()
        vocab_size = read_config(tokenizer_dir).vocab_size
        if model.has_mtp:
            _write_model_with_mtp(transformers, model, model_dir, vocab_size=vocab_size)
        else:
            _random_network(transformers, model, vocab_size=vocab_size).save_pretrained(model_dir)
        for path in tokenizer_dir.glob("tokenizer*"):
            shutil.copyfile(path, model_dir / path.name)

    return fill


def _random_network(transformers: Any, model: _TinyModel, *, vocab_size: int, num_more_layers: int = 0) -> Any:
    """Norms and router biases are random too: at their initial values they would hide an error."""
    transformers.set_seed(_SEED)
    config = getattr(transformers, f"{model.architecture}Config")(**_COMMON, **model.fields, vocab_size=vocab_size)
    config.num_hidden_layers += num_more_layers
    network = getattr(transformers, f"{model.architecture}ForCausalLM")(config).float()
    for parameter in network.parameters():
        if parameter.ndim == 1:
            parameter.data.uniform_(0.8, 1.2)
    for buffer_name, buffer in network.named_buffers():
        if buffer_name.endswith("e_score_correction_bias"):
            buffer.uniform_(0.0, 0.2)
    return network


def _write_model_with_mtp(transformers: Any, model: _TinyModel, model_dir: Path, *, vocab_size: int) -> None:
    """The module is in a file of its own, which `transformers` does not read: it knows of none."""
    network = _random_network(transformers, model, vocab_size=vocab_size, num_more_layers=1)
    random = np.random.default_rng(_SEED)
    follow_two_tokens(network, random)
    mtp_layer = network.model.layers[-1]
    network.model.layers = network.model.layers[:-1]
    network.config.num_hidden_layers -= 1
    network.save_pretrained(model_dir)
    layer: dict[str, Array] = {name: value.numpy() for name, value in mtp_layer.state_dict().items()}
    final_norm = parameters_of(network)["model.norm.weight"]
    tensors = fit_mtp(layer, HiddenStates(network, random), final_norm=final_norm, random=random)
    prefix = f"model.layers.{network.config.num_hidden_layers}."
    save_file({prefix + name: value for name, value in tensors.items()}, model_dir / "mtp.safetensors")


def _write_eagle(head_dir: Path, target_dir: Path) -> None:
    transformers = _import_transformers()
    network = transformers.AutoModelForCausalLM.from_pretrained(target_dir).float()
    transformers.set_seed(_SEED)
    config = transformers.LlamaConfig(**_EAGLE_FIELDS, vocab_size=network.config.vocab_size)
    config.architectures = ["LlamaForCausalLM"]
    layer: dict[str, Array] = {
        name: value.numpy()
        for name, value in transformers.LlamaForCausalLM(config).model.layers[0].state_dict().items()
    }
    save_file(fit_eagle(layer, HiddenStates(network, np.random.default_rng(_SEED))), head_dir / "model.safetensors")
    (head_dir / "config.json").write_text(json.dumps(config.to_dict(), indent=2))


def _import_transformers() -> Any:
    try:
        import transformers
    except ImportError:
        raise ConfigError(f"tiny models are made with transformers: run `pip install '{_TRANSFORMERS}'`") from None
    return transformers
