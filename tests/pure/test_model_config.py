"""What `config.json` may say, and that what it says is never ignored."""

import json
from pathlib import Path

import pytest

from pdserve.errors import ConfigError
from pdserve.model.config import Architecture, read_config
from pdserve.model.rope_config import Llama3Scaling

VALID: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
}


def write(model_dir: Path, **changes: object) -> Path:
    (model_dir / "config.json").write_text(json.dumps(VALID | changes))
    return model_dir


def test_config_with_only_what_is_needed_takes_the_defaults(tmp_path: Path) -> None:
    config = read_config(write(tmp_path))
    assert config.architecture is Architecture.LLAMA
    assert (config.head_dim, config.num_kv_heads, config.rope.theta) == (16, 2, 10_000.0)
    assert config.rope.scaling is None
    assert not config.has_tied_embeddings


@pytest.mark.parametrize("section", ["rope_scaling", "rope_parameters"])
def test_config_with_llama3_rope_reads_its_four_numbers(section: str, tmp_path: Path) -> None:
    rope = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = read_config(write(tmp_path, **{section: rope}))
    assert config.rope.scaling == Llama3Scaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8192
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "Mixtral.*known are LlamaForCausalLM, Qwen2.*, Qwen3"),
        ({"architectures": None}, "known are"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 4.0}}, "rope scaling 'longrope' is not supported"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "factor must be a positive number"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"attention_bias": True}, "attention_bias is not supported"),
        ({"mlp_bias": True}, "mlp_bias is not supported"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "quant_method 'awq' is not supported"),
        ({"hidden_size": "64"}, "hidden_size must be a positive integer"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a positive integer"),
        ({"rms_norm_eps": True}, "rms_norm_eps must be a positive number"),
        ({"num_key_value_heads": 3}, "must be a multiple"),
    ],
)
def test_config_that_asks_for_what_is_missing_is_refused_by_name(
    changes: dict[str, object], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        read_config(write(tmp_path, **changes))


def test_config_of_qwen2_with_sliding_window_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="use_sliding_window"):
        read_config(write(tmp_path, architectures=["Qwen2ForCausalLM"], use_sliding_window=True))


@pytest.mark.parametrize(("text", "message"), [("{", "can't be read"), ("[]", "must hold a JSON object")])
def test_config_that_is_no_json_object_is_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_config(tmp_path)


def test_directory_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        read_config(tmp_path)
