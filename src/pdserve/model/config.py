"""The architecture of a model, read from the `config.json` of a Hugging Face directory. Torch-free."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import cast

from pdserve.errors import ConfigError
from pdserve.kv.layout import DTYPE_BYTES, KvLayout


class Architecture(Enum):
    """Values are the names that `config.json` uses."""

    LLAMA = "LlamaForCausalLM"
    QWEN2 = "Qwen2ForCausalLM"
    QWEN3 = "Qwen3ForCausalLM"


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Scaling:
    """Llama 3.1's stretching of the rotary wavelengths that are long against the original context."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    architecture: Architecture
    num_layers: int
    hidden_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_dim: int
    vocab_size: int
    max_model_len: int
    norm_eps: float
    rope_theta: float
    rope_scaling: Llama3Scaling | None
    has_tied_embeddings: bool

    @property
    def value_dim(self) -> int:
        """Columns of the attention output in one query head."""
        return self.head_dim

    def kv_layout(self, *, page_slots: int, dtype: str) -> KvLayout:
        """Of the whole cache: all KV heads. Raises: `ConfigError` for an unknown dtype."""
        if dtype not in DTYPE_BYTES:
            raise ConfigError(f"dtype {dtype!r} is not supported; known are {', '.join(DTYPE_BYTES)}")
        return KvLayout(
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            page_slots=page_slots,
            dtype=dtype,
        )

    @property
    def has_qkv_bias(self) -> bool:
        return self.architecture is Architecture.QWEN2

    @property
    def has_qk_norm(self) -> bool:
        return self.architecture is Architecture.QWEN3


class _Fields:
    """Typed access to a JSON object; what is missing or of a wrong type is a `ConfigError` with the field's name."""

    def __init__(self, fields: Mapping[str, object], *, path: Path) -> None:
        self._fields = fields
        self._path = path

    def has(self, name: str) -> bool:
        return self._fields.get(name) is not None

    def integer(self, name: str) -> int:
        value = self._fields.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise ConfigError(f"{self._path}: {name} must be a positive integer, not {value!r}")
        return value

    def number(self, name: str) -> float:
        value = self._fields.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise ConfigError(f"{self._path}: {name} must be a positive number, not {value!r}")
        return float(value)

    def text(self, name: str, *, default: str) -> str:
        return str(self._fields.get(name, default))

    def flag(self, name: str) -> bool:
        return bool(self._fields.get(name, False))

    def section(self, name: str) -> "_Fields | None":
        value = self._fields.get(name)
        return _Fields(cast(Mapping[str, object], value), path=self._path) if isinstance(value, dict) else None


def read_config(model_dir: Path) -> ModelConfig:
    """Raises: `ConfigError` when the file is missing or broken, or asks for what is not implemented."""
    path = model_dir / "config.json"
    try:
        raw: object = json.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"{model_dir} has no config.json: it is not a Hugging Face model directory") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} can't be read: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} must hold a JSON object")
    raw_fields = cast(Mapping[str, object], raw)
    architecture = _architecture(raw_fields, path=path)
    fields = _Fields(raw_fields, path=path)
    _refuse_unsupported(fields, architecture=architecture, path=path)
    num_heads = fields.integer("num_attention_heads")
    hidden_dim = fields.integer("hidden_size")
    rope = fields.section("rope_parameters") or fields.section("rope_scaling")
    config = ModelConfig(
        architecture=architecture,
        num_layers=fields.integer("num_hidden_layers"),
        hidden_dim=hidden_dim,
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads") if fields.has("num_key_value_heads") else num_heads,
        head_dim=fields.integer("head_dim") if fields.has("head_dim") else hidden_dim // num_heads,
        ffn_dim=fields.integer("intermediate_size"),
        vocab_size=fields.integer("vocab_size"),
        max_model_len=fields.integer("max_position_embeddings"),
        norm_eps=fields.number("rms_norm_eps"),
        rope_theta=_rope_theta(fields, rope),
        rope_scaling=_rope_scaling(rope, path=path),
        has_tied_embeddings=fields.flag("tie_word_embeddings"),
    )
    if config.num_heads % config.num_kv_heads or config.head_dim % 2:
        raise ConfigError(
            f"{path}: num_attention_heads {config.num_heads} must be a multiple of num_key_value_heads "
            f"{config.num_kv_heads}, and the head dimension {config.head_dim} must be even"
        )
    return config


def _architecture(raw_fields: Mapping[str, object], *, path: Path) -> Architecture:
    names = raw_fields.get("architectures")
    for name in cast(list[object], names) if isinstance(names, list) else []:
        for architecture in Architecture:
            if name == architecture.value:
                return architecture
    known = ", ".join(architecture.value for architecture in Architecture)
    raise ConfigError(f"{path}: architectures {names!r} is not supported; known are {known}")


def _refuse_unsupported(fields: _Fields, *, architecture: Architecture, path: Path) -> None:
    """Settings that would change the result and are not implemented must not be ignored."""
    activation = fields.text("hidden_act", default="silu")
    if activation != "silu":
        raise ConfigError(f"{path}: hidden_act {activation!r} is not supported; known is 'silu'")
    flags = ["mlp_bias", "use_sliding_window", "quantization_config"]
    if architecture is not Architecture.QWEN2:
        flags.append("attention_bias")
    for name in flags:
        if fields.flag(name):
            raise ConfigError(f"{path}: {name} is not supported for {architecture.value}")


def _rope_theta(fields: _Fields, rope: _Fields | None) -> float:
    if rope is not None and rope.has("rope_theta"):
        return rope.number("rope_theta")
    return fields.number("rope_theta") if fields.has("rope_theta") else 10_000.0


def _rope_scaling(rope: _Fields | None, *, path: Path) -> Llama3Scaling | None:
    if rope is None:
        return None
    kind = rope.text("rope_type", default=rope.text("type", default="default"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise ConfigError(f"{path}: rope scaling {kind!r} is not supported; known are 'default' and 'llama3'")
    return Llama3Scaling(
        factor=rope.number("factor"),
        low_freq_factor=rope.number("low_freq_factor"),
        high_freq_factor=rope.number("high_freq_factor"),
        original_max_positions=rope.integer("original_max_position_embeddings"),
    )
