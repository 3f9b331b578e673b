"""Checkpoints whose weights are stored in 8 bits with a scale for each block."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file  # pyright: ignore[reportUnknownVariableType]
from tests.pure.paged_runs import Paged, logits_in_chunks
from tests.pure.thread_ranks import run_ranks
from tests.pure.tiny_checkpoints import Tensors, change_config, random_tokens, write_checkpoint

from pdserve.errors import ConfigError
from pdserve.model.config import read_config
from pdserve.model.parallel import Communicator

FP8_MAX = 448.0
TOKEN_IDS = random_tokens(5, 30)


def is_quantised(name: str) -> bool:
    """As in DeepSeek-V3: all projections but the router, and neither embedding nor head."""
    return name.endswith(("proj.weight", "proj_with_mqa.weight"))


def quantise(weight: torch.Tensor, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(8-bit values, scale of each block, what they stand for), block by block."""
    num_rows, num_columns = weight.shape
    values = torch.empty_like(weight, dtype=torch.float8_e4m3fn)
    scales = torch.empty(-(-num_rows // block[0]), -(-num_columns // block[1]))
    meant = torch.empty_like(weight)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            at = slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1])
            scales[i, j] = weight[at].abs().max() / FP8_MAX
            values[at] = (weight[at] / scales[i, j]).to(torch.float8_e4m3fn)
            meant[at] = values[at].float() * scales[i, j]
    return values, scales, meant


def quantised_and_plain(tensors: Tensors, block: tuple[int, int]) -> tuple[Tensors, Tensors]:
    """(in 8 bits with their scales, what those stand for)"""
    quantised: Tensors = {}
    plain: Tensors = {}
    for name, tensor in tensors.items():
        if is_quantised(name):
            quantised[name], quantised[f"{name}_scale_inv"], plain[name] = quantise(tensor, block)
        else:
            quantised[name] = plain[name] = tensor
    return quantised, plain


def write_pair(quantised_dir: Path, plain_dir: Path, block: tuple[int, int]) -> None:
    """The same model in 8 bits, and as its 8 bits read by hand."""
    write_checkpoint("deepseek-v3", quantised_dir)
    write_checkpoint("deepseek-v3", plain_dir)
    quantised, plain = quantised_and_plain(load_file(plain_dir / "model.safetensors"), block)
    save_file(quantised, quantised_dir / "model.safetensors")
    save_file(plain, plain_dir / "model.safetensors")
    change_config(
        quantised_dir,
        quantization_config={
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "weight_block_size": list(block),
        },
    )


def change_tensors(model_dir: Path, change: Callable[[Tensors], None]) -> None:
    tensors = load_file(model_dir / "model.safetensors")
    change(tensors)
    save_file(tensors, model_dir / "model.safetensors")


def logits_of(model_dir: Path, communicator: Communicator | None = None) -> torch.Tensor:
    return logits_in_chunks(Paged.load(model_dir, communicator), TOKEN_IDS, [29, 30])


# One ragged block a tensor; blocks that the cuts over 3 ranks (16 hidden columns, 2 heads of 20 and 22) go through.
@pytest.mark.parametrize("block", [(128, 128), (12, 20)])
def test_logits_of_8_bit_weights_equal_those_of_the_weights_they_stand_for(
    block: tuple[int, int], tmp_path: Path
) -> None:
    quantised_dir, plain_dir = tmp_path / "quantised", tmp_path / "plain"
    write_pair(quantised_dir, plain_dir, block)
    expected_TV = logits_of(plain_dir)
    assert torch.equal(logits_of(quantised_dir), expected_TV)
    for logits_TV in run_ranks(3, lambda communicator: logits_of(quantised_dir, communicator)):
        assert torch.equal(logits_TV, expected_TV)


def test_layers_for_multi_token_prediction_are_left_out(tmp_path: Path) -> None:
    """DeepSeek-V3's checkpoint has one layer more than num_hidden_layers."""
    write_checkpoint("deepseek-v3", tmp_path)
    expected_TV = logits_of(tmp_path)

    def add_layer(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.startswith("model.layers.2.")]:
            tensors[name.replace(".2.", ".3.", 1)] = tensors[name].clone()
        tensors["model.layers.3.eh_proj.weight"] = torch.zeros(48, 96)

    change_tensors(tmp_path, add_layer)
    assert torch.equal(logits_of(tmp_path), expected_TV)


def drop_scale(tensors: Tensors) -> None:
    del tensors["model.layers.1.self_attn.kv_b_proj.weight_scale_inv"]


def shorten_scale(tensors: Tensors) -> None:
    name = "model.layers.1.self_attn.kv_b_proj.weight_scale_inv"
    tensors[name] = tensors[name][:-1].clone()


def store_in_other_type(tensors: Tensors) -> None:
    name = "model.layers.1.self_attn.kv_b_proj.weight"
    tensors[name] = tensors[name].float().to(torch.float8_e5m2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop_scale, r"no tensor model\.layers\.1\.self_attn\.kv_b_proj\.weight_scale_inv"),
        (shorten_scale, r"kv_b_proj\.weight_scale_inv has shape \(10, 1\), but config.json asks for \(11, 1\)"),
        (store_in_other_type, r"kv_b_proj\.weight is stored as F8_E5M2, which is not supported"),
    ],
)
def test_8_bit_weights_with_a_tensor_that_does_not_fit_are_refused_by_its_name(
    change: Callable[[Tensors], None], message: str, tmp_path: Path
) -> None:
    quantised_dir = tmp_path / "quantised"
    write_pair(quantised_dir, tmp_path / "plain", (12, 20))
    change_tensors(quantised_dir, change)
    with pytest.raises(ConfigError, match=message):
        Paged.load(quantised_dir)


def test_8_bit_weights_without_a_block_size_are_refused(tmp_path: Path) -> None:
    write_pair(tmp_path / "quantised", tmp_path / "plain", (128, 128))
    change_config(tmp_path / "quantised", quantization_config=None)
    with pytest.raises(ConfigError, match="stored in 8 bits, but"):
        Paged.load(tmp_path / "quantised")


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({"quant_method": "gptq", "bits": 4}, "quant_method 'gptq' is not supported; known are 'fp8'"),
        ({"bits": 4}, "quant_method 'unnamed' is not supported"),
        ({"quant_method": "fp8", "fmt": "e5m2", "weight_block_size": [128, 128]}, "fmt 'e5m2' is not supported"),
        ({"quant_method": "fp8"}, "weight_block_size must be rows and columns of a block"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size must be rows and columns of a block"),
        ({"quant_method": "fp8", "weight_block_size": 128}, "weight_block_size must be a list of integers"),
    ],
)
def test_config_with_another_quantisation_is_refused_by_name(
    quantization: dict[str, object], message: str, tmp_path: Path
) -> None:
    write_checkpoint("deepseek-v3", tmp_path)
    change_config(tmp_path, quantization_config=quantization)
    with pytest.raises(ConfigError, match=message):
        read_config(tmp_path)
