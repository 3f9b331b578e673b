"""What `config.json` may say of DeepSeek's models and Qwen3-MoE, and that what it says is never ignored."""

import json
import math
from pathlib import Path

import pytest

from pdserve.errors import ConfigError
from pdserve.kv.layout import KvLayout
from pdserve.model.config import read_config
from pdserve.model.experts_config import GroupScore, Scoring
from pdserve.model.rope_config import YarnScaling

# As in the checkpoints of the Hugging Face hub, but for what is not read.
DEEPSEEK_V3: dict[str, object] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "v_head_dim": 128,
    "vocab_size": 129280,
}
DEEPSEEK_V2_LITE: dict[str, object] = DEEPSEEK_V3 | {
    "architectures": ["DeepseekV2ForCausalLM"],
    "first_k_dense_replace": 1,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "q_lora_rank": None,
    "quantization_config": None,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "topk_group": 1,
    "topk_method": "greedy",
}
QWEN3_CODER: dict[str, object] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 6144,
    "intermediate_size": 8192,
    "max_position_embeddings": 262144,
    "mlp_only_layers": [],
    "moe_intermediate_size": 2560,
    "norm_topk_prob": True,
    "num_attention_heads": 96,
    "num_experts": 160,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 62,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000000,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def write(model_dir: Path, fields: dict[str, object]) -> Path:
    (model_dir / "config.json").write_text(json.dumps(fields))
    return model_dir


def test_config_of_deepseek_v3_is_read_whole(tmp_path: Path) -> None:
    config = read_config(write(tmp_path, DEEPSEEK_V3))
    assert config.latent is not None
    assert (config.latent.cache_dim, config.head_dim, config.value_dim, config.rotary_dim) == (576, 192, 128, 64)
    assert config.kv_layout(page_slots=16, dtype="bfloat16") == KvLayout(
        num_layers=61, num_kv_heads=1, head_dim=576, page_slots=16, dtype="bfloat16", num_planes=1
    )
    assert config.experts is not None
    assert config.experts.layers == tuple(range(3, 61))
    assert (config.experts.scoring, config.experts.group_score) == (Scoring.SIGMOID, GroupScore.BEST_TWO)
    assert (config.experts.num_groups, config.experts.num_chosen_groups, config.experts.weight_scale) == (8, 4, 2.5)
    assert config.fp8_block == (128, 128)
    assert config.rope.scaling == YarnScaling(
        factor=40.0,
        fast_turns=32.0,
        slow_turns=1.0,
        original_max_positions=4096,
        table_scale=1.0,
        softmax_scale=(0.1 * math.log(40.0) + 1.0) ** 2,
    )


def test_config_of_deepseek_v2_lite_has_no_compressed_query_and_no_groups(tmp_path: Path) -> None:
    config = read_config(write(tmp_path, DEEPSEEK_V2_LITE))
    assert config.latent is not None
    assert config.latent.q_rank is None
    assert config.latent.has_rotary_pairs
    assert config.experts is not None
    assert (config.experts.num_groups, config.experts.shared_ffn_dim) == (1, 4096)
    assert not config.experts.has_unit_sum


def test_config_of_qwen3_coder_has_experts_in_all_layers(tmp_path: Path) -> None:
    config = read_config(write(tmp_path, QWEN3_CODER))
    assert config.latent is None
    assert config.experts is not None
    assert config.experts.layers == tuple(range(62))
    assert (config.experts.shared_ffn_dim, config.experts.weight_scale) == (0, 1.0)
    assert config.kv_layout(page_slots=16, dtype="float32").num_kv_heads == 8


@pytest.mark.parametrize(
    ("fields", "layers"),
    [
        (DEEPSEEK_V3 | {"num_hidden_layers": 8, "moe_layer_freq": 2}, (4, 6)),
        (DEEPSEEK_V3 | {"num_hidden_layers": 3, "first_k_dense_replace": 0}, (0, 1, 2)),
        (QWEN3_CODER | {"num_hidden_layers": 5, "decoder_sparse_step": 2}, (1, 3)),
        (QWEN3_CODER | {"num_hidden_layers": 4, "mlp_only_layers": [0, 2]}, (1, 3)),
    ],
)
def test_layers_with_experts_are_those_that_the_settings_name(
    fields: dict[str, object], layers: tuple[int, ...], tmp_path: Path
) -> None:
    experts = read_config(write(tmp_path, fields)).experts
    assert experts is not None
    assert experts.layers == layers


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (DEEPSEEK_V3 | {"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported; known are 'sigmoid'"),
        (DEEPSEEK_V3 | {"topk_method": "greedy"}, "topk_method 'greedy' is not supported; known are 'noaux_tc'"),
        (DEEPSEEK_V3 | {"attention_bias": True}, "attention_bias is not supported for DeepseekV3ForCausalLM"),
        (DEEPSEEK_V3 | {"n_group": 7}, "n_group 7 does not divide the 256 experts"),
        (DEEPSEEK_V3 | {"n_group": 256, "topk_group": 9}, "n_group 256 leaves less than two experts in a group"),
        (DEEPSEEK_V3 | {"topk_group": 9}, "topk_group 9 is more than n_group 8"),
        (DEEPSEEK_V3 | {"num_experts_per_tok": 129}, "num_experts_per_tok 129 is more than the 128 experts"),
        (DEEPSEEK_V3 | {"kv_lora_rank": None}, "kv_lora_rank must be a positive integer"),
        (DEEPSEEK_V3 | {"qk_rope_head_dim": 63}, "rotary dimension 63 must be even"),
        (DEEPSEEK_V2_LITE | {"scoring_func": "sigmoid"}, "scoring_func 'sigmoid' is not supported"),
        (DEEPSEEK_V2_LITE | {"topk_method": "noaux_tc"}, "topk_method 'noaux_tc' is not supported"),
        (
            DEEPSEEK_V2_LITE | {"norm_topk_prob": True, "routed_scaling_factor": 16.0},
            "norm_topk_prob with a routed_scaling_factor is not supported",
        ),
        (QWEN3_CODER | {"attention_bias": True}, "attention_bias is not supported for Qwen3MoeForCausalLM"),
        (QWEN3_CODER | {"decoder_sparse_step": 0}, "decoder_sparse_step must be a positive integer"),
        (QWEN3_CODER | {"mlp_only_layers": ["first"]}, "mlp_only_layers must be a list of integers"),
        (QWEN3_CODER | {"num_experts": None}, "num_experts must be a positive integer"),
        (
            DEEPSEEK_V3 | {"rope_scaling": {"type": "yarn", "factor": 40, "mscale": 1.0}},
            "needs both or none of mscale and mscale_all_dim",
        ),
        (
            DEEPSEEK_V3 | {"rope_scaling": {"type": "yarn", "factor": 40, "truncate": False}},
            "truncate false is not supported",
        ),
    ],
)
def test_config_that_asks_for_what_is_missing_is_refused_by_name(
    fields: dict[str, object], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        read_config(write(tmp_path, fields))


def test_layout_with_an_unknown_dtype_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="dtype 'float8' is not supported; known are float32"):
        read_config(write(tmp_path, QWEN3_CODER)).kv_layout(page_slots=16, dtype="float8")
