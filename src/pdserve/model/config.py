"""The architecture of a model, read from the `config.json` of a Hugging Face directory. Torch-free."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import assert_never, cast

from pdserve.errors import ConfigError
from pdserve.kv.layout import DTYPE_BYTES, KvLayout
from pdserve.model.experts_config import (
    ExpertsConfig,
    read_deepseek_v2_experts,
    read_deepseek_v3_experts,
    read_qwen3_experts,
)
from pdserve.model.json_fields import JsonFields
from pdserve.model.latent_config import LatentConfig, read_latent
from pdserve.model.rope_config import RopeConfig, read_rope


class Architecture(Enum):
    """Values are the names that `config.json` uses."""

    LLAMA = "LlamaForCausalLM"
    QWEN2 = "Qwen2ForCausalLM"
    QWEN3 = "Qwen3ForCausalLM"
    QWEN3_MOE = "Qwen3MoeForCausalLM"
    DEEPSEEK_V2 = "DeepseekV2ForCausalLM"
    DEEPSEEK_V3 = "DeepseekV3ForCausalLM"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    architecture: Architecture
    num_layers: int
    hidden_dim: int
    num_heads: int
    num_kv_heads: int
    """Heads of the cache: with latent attention, one."""
    head_dim: int
    """Of a query head."""
    ffn_dim: int
    """Of the dense layers."""
    vocab_size: int
    max_model_len: int
    norm_eps: float
    rope: RopeConfig
    has_tied_embeddings: bool
    latent: LatentConfig | None
    """None: grouped-query attention."""
    experts: ExpertsConfig | None
    """None: all layers are dense."""
    fp8_block: tuple[int, int] | None
    """Rows and columns of a weight that share a scale, where weights are stored in 8 bits."""

    @property
    def has_qkv_bias(self) -> bool:
        return self.architecture is Architecture.QWEN2

    @property
    def has_qk_norm(self) -> bool:
        return self.architecture in (Architecture.QWEN3, Architecture.QWEN3_MOE)

    @property
    def value_dim(self) -> int:
        """Columns of the attention output in one query head."""
        return self.head_dim if self.latent is None else self.latent.value_dim

    @property
    def rotary_dim(self) -> int:
        """Dimensions of a head that turn with the position."""
        return self.head_dim if self.latent is None else self.latent.rotary_dim

    def kv_layout(self, *, page_slots: int, dtype: str) -> KvLayout:
        """Of the whole cache: all KV heads. Raises: `ConfigError` for an unknown dtype."""
        if dtype not in DTYPE_BYTES:
            raise ConfigError(f"dtype {dtype!r} is not supported; known are {', '.join(DTYPE_BYTES)}")
        return KvLayout(
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim if self.latent is None else self.latent.cache_dim,
            page_slots=page_slots,
            dtype=dtype,
            num_planes=2 if self.latent is None else 1,
        )


def read_config(model_dir: Path) -> ModelConfig:
    """Raises: `ConfigError` when the file is missing or broken, or asks for what is not implemented."""
    fields = read_fields(model_dir)
    return config_of(fields, _architecture(fields))


def read_fields(model_dir: Path) -> JsonFields:
    """All of `config.json`. Raises: `ConfigError` when it is missing or broken."""
    path = model_dir / "config.json"
    return JsonFields(_read_json(path), path=path)


def config_of(fields: JsonFields, architecture: Architecture) -> ModelConfig:
    """The fields as that architecture takes them, whatever they say of it. Raises: `ConfigError`."""
    _refuse_unsupported(fields, architecture=architecture)
    num_heads = fields.integer("num_attention_heads")
    num_layers = fields.integer("num_hidden_layers")
    max_model_len = fields.integer("max_position_embeddings")
    latent = _latent(fields, architecture=architecture)
    config = ModelConfig(
        architecture=architecture,
        num_layers=num_layers,
        hidden_dim=fields.integer("hidden_size"),
        num_heads=num_heads,
        num_kv_heads=(fields.optional_integer("num_key_value_heads") or num_heads) if latent is None else 1,
        head_dim=_head_dim(fields, latent, num_heads=num_heads),
        ffn_dim=fields.integer("intermediate_size"),
        vocab_size=fields.integer("vocab_size"),
        max_model_len=max_model_len,
        norm_eps=fields.number("rms_norm_eps"),
        rope=read_rope(fields, max_positions=max_model_len),
        has_tied_embeddings=fields.flag("tie_word_embeddings"),
        latent=latent,
        experts=_experts(fields, architecture=architecture, num_layers=num_layers),
        fp8_block=_fp8_block(fields),
    )
    if config.num_heads % config.num_kv_heads or config.rotary_dim % 2:
        raise fields.refusal(
            f"num_attention_heads {config.num_heads} must be a multiple of num_key_value_heads "
            f"{config.num_kv_heads}, and the rotary dimension {config.rotary_dim} must be even"
        )
    return config


def _read_json(path: Path) -> Mapping[str, object]:
    try:
        raw: object = json.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"{path.parent} has no config.json: it is not a Hugging Face model directory") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} can't be read: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} must hold a JSON object")
    return cast(Mapping[str, object], raw)


def _architecture(fields: JsonFields) -> Architecture:
    names = fields.texts("architectures")
    for architecture in Architecture:
        if architecture.value in names:
            return architecture
    known = ", ".join(architecture.value for architecture in Architecture)
    raise fields.refusal(f"architectures {list(names)} is not supported; known are {known}")


def _refuse_unsupported(fields: JsonFields, *, architecture: Architecture) -> None:
    """Settings that would change the result and are not implemented must not be ignored."""
    fields.choice("hidden_act", known=("silu",), default="silu")
    flags = ["mlp_bias", "use_sliding_window"]
    if architecture is not Architecture.QWEN2:
        flags.append("attention_bias")
    for name in flags:
        if fields.flag(name):
            raise fields.refusal(f"{name} is not supported for {architecture.value}")


def _latent(fields: JsonFields, *, architecture: Architecture) -> LatentConfig | None:
    match architecture:
        case Architecture.DEEPSEEK_V2 | Architecture.DEEPSEEK_V3:
            return read_latent(fields)
        case Architecture.LLAMA | Architecture.QWEN2 | Architecture.QWEN3 | Architecture.QWEN3_MOE:
            return None
        case _:
            assert_never(architecture)


def _experts(fields: JsonFields, *, architecture: Architecture, num_layers: int) -> ExpertsConfig | None:
    match architecture:
        case Architecture.LLAMA | Architecture.QWEN2 | Architecture.QWEN3:
            return None
        case Architecture.QWEN3_MOE:
            return read_qwen3_experts(fields, num_layers=num_layers)
        case Architecture.DEEPSEEK_V2:
            return read_deepseek_v2_experts(fields, num_layers=num_layers) if fields.has("n_routed_experts") else None
        case Architecture.DEEPSEEK_V3:
            return read_deepseek_v3_experts(fields, num_layers=num_layers)
        case _:
            assert_never(architecture)


def _head_dim(fields: JsonFields, latent: LatentConfig | None, *, num_heads: int) -> int:
    if latent is not None:
        return latent.plain_dim + latent.rotary_dim
    return fields.optional_integer("head_dim") or fields.integer("hidden_size") // num_heads


def _fp8_block(fields: JsonFields) -> tuple[int, int] | None:
    quantization = fields.section("quantization_config")
    if quantization is None:
        return None
    quantization.choice("quant_method", known=("fp8",), default="unnamed")
    quantization.choice("fmt", known=("e4m3",), default="e4m3")
    block = quantization.integers("weight_block_size")
    if len(block) != 2 or min(block) <= 0:
        raise fields.refusal(f"weight_block_size must be rows and columns of a block, not {list(block)}")
    return block[0], block[1]
