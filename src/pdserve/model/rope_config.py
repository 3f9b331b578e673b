"""What `config.json` says of the rotary position embedding. Torch-free."""

import math
from dataclasses import dataclass

from pdserve.model.json_fields import JsonFields

_DEFAULT_THETA = 10_000.0
_YARN_FAST_TURNS = 32.0
_YARN_SLOW_TURNS = 1.0
"""Of beta_fast and beta_slow where they are not given. Source: YaRN (arXiv 2309.00071), section 3.2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Scaling:
    """Llama 3.1's stretching of the rotary wavelengths that are long against the original context."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnScaling:
    """Wavelengths that turn less than `slow_turns` in the original context are stretched, fast ones kept."""

    factor: float
    fast_turns: float
    slow_turns: float
    original_max_positions: int
    table_scale: float
    """Of sine and cosine, so of every product of a rotated query and key its square."""
    softmax_scale: float
    """Of the whole score; DeepSeek's models have it, beside the other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    theta: float
    scaling: Llama3Scaling | YarnScaling | None


def read_rope(fields: JsonFields, *, max_positions: int) -> RopeConfig:
    """Raises: `ConfigError` for a scaling that is not implemented."""
    rope = fields.section("rope_parameters") or fields.section("rope_scaling")
    theta = fields.number("rope_theta", default=_DEFAULT_THETA)
    if rope is None:
        return RopeConfig(theta=theta, scaling=None)
    return RopeConfig(
        theta=rope.number("rope_theta", default=theta), scaling=_scaling(rope, max_positions=max_positions)
    )


def _scaling(rope: JsonFields, *, max_positions: int) -> Llama3Scaling | YarnScaling | None:
    kind = rope.text("rope_type", default=rope.text("type", default="default"))
    if kind == "default":
        return None
    if kind == "yarn":
        return _yarn(rope, max_positions=max_positions)
    if kind != "llama3":
        raise rope.refusal(f"rope scaling {kind!r} is not supported; known are 'default', 'llama3' and 'yarn'")
    return Llama3Scaling(
        factor=rope.number("factor"),
        low_freq_factor=rope.number("low_freq_factor"),
        high_freq_factor=rope.number("high_freq_factor"),
        original_max_positions=rope.integer("original_max_position_embeddings"),
    )


def _yarn(rope: JsonFields, *, max_positions: int) -> YarnScaling:
    if not rope.flag("truncate", default=True):
        raise rope.refusal("truncate false is not supported for rope scaling 'yarn'")
    if rope.has("mscale") != rope.has("mscale_all_dim"):
        raise rope.refusal("rope scaling 'yarn' needs both or none of mscale and mscale_all_dim")
    factor = rope.number("factor")
    softmax_scale = 1.0
    table_scale = _magnitude(factor, 1.0)
    if rope.has("mscale"):
        magnitude_of_all = _magnitude(factor, rope.number("mscale_all_dim"))
        table_scale = _magnitude(factor, rope.number("mscale")) / magnitude_of_all
        softmax_scale = magnitude_of_all**2
    return YarnScaling(
        factor=factor,
        fast_turns=rope.number("beta_fast", default=_YARN_FAST_TURNS),
        slow_turns=rope.number("beta_slow", default=_YARN_SLOW_TURNS),
        original_max_positions=rope.optional_integer("original_max_position_embeddings") or max_positions,
        table_scale=rope.number("attention_factor", default=table_scale),
        softmax_scale=softmax_scale,
    )


def _magnitude(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1.0 else 1.0
