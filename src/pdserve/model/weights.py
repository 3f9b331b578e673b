"""Safetensors of a Hugging Face directory, loaded into a `Decoder` with Q, K, V and gate, up packed."""

from collections.abc import Iterable
from pathlib import Path
from typing import Protocol, cast

import torch
from safetensors import SafetensorError, safe_open

from pdserve.errors import ConfigError
from pdserve.model.checkpoint import weight_files
from pdserve.model.config import ModelConfig
from pdserve.model.decoder import Decoder

_LAYER_SOURCES = {
    "attention_norm.weight": ("input_layernorm.weight",),
    "attention.qkv.weight": ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
    "attention.qkv.bias": ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"),
    "attention.output.weight": ("self_attn.o_proj.weight",),
    "attention.q_norm.weight": ("self_attn.q_norm.weight",),
    "attention.k_norm.weight": ("self_attn.k_norm.weight",),
    "feed_forward_norm.weight": ("post_attention_layernorm.weight",),
    "feed_forward.gate_up.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "feed_forward.down.weight": ("mlp.down_proj.weight",),
}
"""Parameter of a `DecoderLayer` -> the tensors of the checkpoint whose rows make it up, in order."""

_OUTER_SOURCES = {
    "embedding.weight": ("model.embed_tokens.weight",),
    "final_norm.weight": ("model.norm.weight",),
    "lm_head.weight": ("lm_head.weight",),
}


def load_decoder(model_dir: Path, config: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> Decoder:
    """Raises: `ConfigError` when a tensor is missing or has another shape than the config says."""
    with torch.device("meta"):
        decoder = Decoder(config)
    tensors = _Tensors(model_dir)
    for name, parameter in list(decoder.named_parameters()):
        sources = _sources(name)
        loaded = torch.cat([tensors.read(source) for source in sources]).to(device=device, dtype=dtype)
        if loaded.shape != parameter.shape:
            raise ConfigError(
                f"{model_dir}: {' + '.join(sources)} has shape {tuple(loaded.shape)}, "
                f"but config.json asks for {tuple(parameter.shape)}"
            )
        owner_name, _, leaf = name.rpartition(".")
        setattr(decoder.get_submodule(owner_name), leaf, torch.nn.Parameter(loaded, requires_grad=False))
    if config.has_tied_embeddings:
        decoder.lm_head.weight = decoder.embedding.weight
    decoder.build_rope_tables(device)
    return decoder.eval()


def _sources(parameter_name: str) -> tuple[str, ...]:
    prefix, _, rest = parameter_name.partition(".")
    if prefix != "layers":
        return _OUTER_SOURCES[parameter_name]
    layer_index, _, leaf = rest.partition(".")
    return tuple(f"model.layers.{layer_index}.{source}" for source in _LAYER_SOURCES[leaf])


class _OpenFile(Protocol):
    """What is used of safetensors' file, which has no types."""

    def __enter__(self) -> "_OpenFile": ...
    def __exit__(self, *exception: object) -> None: ...
    def keys(self) -> Iterable[str]: ...
    def get_tensor(self, name: str) -> torch.Tensor: ...


def _open(path: Path) -> _OpenFile:
    try:
        return cast(_OpenFile, safe_open(path, framework="pt"))
    except SafetensorError as error:
        raise ConfigError(f"{path} is not a safetensors file: {error}") from error


class _Tensors:
    """All tensors of a directory by name, whichever file holds them."""

    def __init__(self, model_dir: Path) -> None:
        self._model_dir = model_dir
        self._file_of: dict[str, Path] = {}
        for path in weight_files(model_dir):
            with _open(path) as file:
                self._file_of.update(dict.fromkeys(file.keys(), path))

    def read(self, name: str) -> torch.Tensor:
        path = self._file_of.get(name)
        if path is None:
            raise ConfigError(f"{self._model_dir}: the weights have no tensor {name}")
        with _open(path) as file:
            return file.get_tensor(name)
