"""What `config.json` says of an MTP module or an EAGLE head, as the config of the head's own layers. Torch-free."""

from dataclasses import replace
from pathlib import Path

from pdserve.errors import ConfigError
from pdserve.model.config import Architecture, ModelConfig, config_of, read_config, read_fields
from pdserve.model.experts_config import read_deepseek_v3_experts
from pdserve.model.json_fields import JsonFields


def mtp_config(model_dir: Path) -> ModelConfig:
    """Of the first multi-token prediction module that a DeepSeek-V3 checkpoint brings: one layer.

    Raises: `ConfigError` when it brings none.
    """
    target = read_config(model_dir)
    fields = read_fields(model_dir)
    if target.architecture is not Architecture.DEEPSEEK_V3 or fields.count("num_nextn_predict_layers", default=0) == 0:
        raise fields.refusal(
            "the model has no MTP module (num_nextn_predict_layers of a DeepseekV3ForCausalLM): "
            "speculate with ngram or a draft model instead"
        )
    # The module is one layer more, and has experts where such a layer would.
    experts = read_deepseek_v3_experts(fields, num_layers=target.num_layers + 1)
    has_experts = target.num_layers in experts.layers
    return replace(target, num_layers=1, experts=replace(experts, layers=(0,)) if has_experts else None)


def eagle_config(head_dir: Path, target_config: ModelConfig) -> ModelConfig:
    """Of an EAGLE head, which serves prompts as long as the model does.

    Raises: `ConfigError` when the head is none for this model, or of a kind that is not implemented.
    """
    fields = read_fields(head_dir)
    _refuse_unsupported(fields)
    _refuse_pickled(head_dir)
    # The heads of Qwen2 are Llama's layers but for this bias, and say so nowhere else.
    architecture = Architecture.QWEN2 if fields.flag("qkv_bias") else Architecture.LLAMA
    config = config_of(fields, architecture)
    for name, ours, theirs in (
        ("hidden_size", config.hidden_dim, target_config.hidden_dim),
        ("vocab_size", config.vocab_size, target_config.vocab_size),
    ):
        if ours != theirs:
            raise fields.refusal(
                f"{name} {ours} is not the model's, {theirs}: name a head that was trained for this model"
            )
    return replace(config, max_model_len=target_config.max_model_len)


def eagle3_refusal(head_dir: Path) -> ConfigError:
    return ConfigError(
        f"{head_dir} is an EAGLE-3 head, which is not supported (it reads hidden states of three layers, and has a "
        "vocabulary of its own): name a head of EAGLE or EAGLE-2"
    )


def _refuse_unsupported(fields: JsonFields) -> None:
    names = fields.texts("architectures")
    if any("eagle3" in name.lower() for name in names) or fields.has("draft_vocab_size"):
        raise eagle3_refusal(fields.path.parent)
    if not any("llama" in name.lower() for name in names):
        raise fields.refusal(
            f"architectures {list(names)} is no EAGLE head; known are LlamaForCausalLM, EagleLlamaForCausalLM and "
            "LlamaForCausalLMEagle"
        )
    if fields.flag("add_para_norm"):
        raise fields.refusal("add_para_norm (norms before the projection) is not supported")


def _refuse_pickled(head_dir: Path) -> None:
    """A pickle can run anything when it is read."""
    pickled = sorted(head_dir.glob("pytorch_model*.bin"))
    if pickled and not any(head_dir.glob("*.safetensors")):
        raise ConfigError(
            f"{pickled[0]} is a pickle, which is not read: convert it with safetensors.torch.save_file to "
            f"{head_dir / 'model.safetensors'}"
        )
