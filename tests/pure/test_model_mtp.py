"""MTP modules of DeepSeek-V3 checkpoints, against their formula around a layer of `transformers`, which has none.

Source of the formula: DeepSeek-V3 (arXiv 2412.19437), section 2.2.

Shape suffixes: T tokens, E hidden, V vocabulary.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType]
from tests.pure.paged_runs import Paged, logits_in_chunks
from tests.pure.sequence_cache import SequenceCache
from tests.pure.test_model_fp8 import quantised_and_plain
from tests.pure.tiny_checkpoints import (
    NUM_LAYERS,
    Tensors,
    change_config,
    random_tokens,
    read_tensors,
    write_checkpoint,
    write_mtp_checkpoint,
)

from pdserve.errors import ConfigError
from pdserve.model.config import read_config
from pdserve.model.draft_head import DraftHeadModule
from pdserve.model.draft_head_config import mtp_config
from pdserve.model.mtp import MtpModule, load_mtp

NUM_TOKENS, HIDDEN_DIM = 30, 48
MAX_DIFFERENCE = 1e-4
PREFIX = f"model.layers.{NUM_LAYERS}."


def load(model_dir: Path) -> MtpModule:
    return load_mtp(model_dir, read_config(model_dir), dtype=torch.float32, device=torch.device("cpu"))


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    """(token_ids_T, previous_TE)"""
    previous_TE = torch.randn(NUM_TOKENS, HIDDEN_DIM, generator=torch.Generator().manual_seed(2))
    return torch.tensor(random_tokens(4, NUM_TOKENS)), previous_TE


@torch.inference_mode()
def run(head: DraftHeadModule, stops: list[int]) -> torch.Tensor:
    """states_TE, in the chunks that end at `stops`."""
    token_ids_T, previous_TE = inputs()
    cache, ticks = SequenceCache(), list[int]()

    def tick(layer_index: int) -> None:
        ticks.append(layer_index)

    states: list[torch.Tensor] = []
    for start, stop in zip([0, *stops[:-1]], stops, strict=True):
        chunk = slice(start, stop)
        states.append(head.forward(token_ids_T[chunk], previous_TE[chunk], torch.arange(start, stop), cache, tick))
    assert ticks == list(range(head.config.num_layers)) * len(stops)
    return torch.cat(states)


def rms_norm(x_TE: torch.Tensor, weight_E: torch.Tensor) -> torch.Tensor:
    return x_TE / (x_TE.square().mean(-1, keepdim=True) + 1e-3).sqrt() * weight_E


@torch.inference_mode()
def reference(model_dir: Path, layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(states_TE, logits_TV)"""
    tensors = read_tensors(model_dir)

    def of(name: str, shared: str = "") -> torch.Tensor:
        return tensors[PREFIX + name] if PREFIX + name in tensors else tensors[shared]

    token_ids_T, previous_TE = inputs()
    embedded_TE = rms_norm(of("embed_tokens.weight", "model.embed_tokens.weight")[token_ids_T], of("enorm.weight"))
    merged_TE = torch.cat((embedded_TE, rms_norm(previous_TE, of("hnorm.weight"))), dim=1) @ of("eh_proj.weight").T
    states_TE = layer(inputs_embeds=merged_TE[None], use_cache=False).last_hidden_state[0]
    head_VE = of("shared_head.head.weight", "lm_head.weight")
    return states_TE, rms_norm(states_TE, of("shared_head.norm.weight")) @ head_VE.T


@pytest.mark.parametrize("shares_ends", [False, True])
def test_mtp_module_computes_the_formula(*, shares_ends: bool, tmp_path: Path) -> None:
    expected_TE, expected_TV = reference(tmp_path, write_mtp_checkpoint(tmp_path, shares_ends=shares_ends))
    module = load(tmp_path)
    states_TE = run(module, [NUM_TOKENS])
    assert (states_TE - expected_TE).abs().max() < MAX_DIFFERENCE
    assert (module.logits(states_TE) - expected_TV).abs().max() < MAX_DIFFERENCE * expected_TV.std()


def test_mtp_module_in_chunks_equals_the_whole(tmp_path: Path) -> None:
    write_mtp_checkpoint(tmp_path)
    module = load(tmp_path)
    whole_TE = run(module, [NUM_TOKENS])
    for stops in ([1, 2, 20, NUM_TOKENS], list(range(1, NUM_TOKENS + 1))):
        assert (run(module, stops) - whole_TE).abs().max() < MAX_DIFFERENCE


def test_mtp_module_of_8_bit_weights_equals_that_of_the_weights_they_stand_for(tmp_path: Path) -> None:
    dirs = {name: tmp_path / name for name in ("quantised", "plain")}
    for model_dir in dirs.values():
        model_dir.mkdir()
        write_mtp_checkpoint(model_dir)
    block = (12, 20)
    quantised, plain = quantised_and_plain(read_tensors(dirs["plain"]), block)
    assert f"{PREFIX}self_attn.kv_b_proj.weight_scale_inv" in quantised
    for name, tensors in (("quantised", quantised), ("plain", plain)):
        (dirs[name] / "mtp.safetensors").unlink()
        save_file(tensors, dirs[name] / "model.safetensors")
    change_config(dirs["quantised"], quantization_config={"quant_method": "fp8", "weight_block_size": list(block)})
    assert torch.equal(run(load(dirs["quantised"]), [NUM_TOKENS]), run(load(dirs["plain"]), [NUM_TOKENS]))


def test_model_with_an_mtp_module_computes_what_it_computes_without(tmp_path: Path) -> None:
    write_mtp_checkpoint(tmp_path)
    token_ids = random_tokens(5, NUM_TOKENS)
    with_module_TV = logits_in_chunks(Paged.load(tmp_path), token_ids, [NUM_TOKENS])
    tensors = {name: tensor for name, tensor in read_tensors(tmp_path).items() if not name.startswith(PREFIX)}
    (tmp_path / "mtp.safetensors").unlink()
    save_file(tensors, tmp_path / "model.safetensors")
    assert torch.equal(logits_in_chunks(Paged.load(tmp_path), token_ids, [NUM_TOKENS]), with_module_TV)


def test_mtp_config_is_that_of_one_layer_with_the_cache_of_the_model(tmp_path: Path) -> None:
    write_mtp_checkpoint(tmp_path)
    target, config = read_config(tmp_path), mtp_config(tmp_path)
    assert (config.num_layers, config.max_model_len) == (1, target.max_model_len)
    assert config.experts is not None and config.experts.layers == (0,)
    layout = config.kv_layout(page_slots=8, dtype="float32")
    assert layout.token_bytes * NUM_LAYERS == target.kv_layout(page_slots=8, dtype="float32").token_bytes


def test_mtp_config_of_a_module_after_dense_layers_has_no_experts(tmp_path: Path) -> None:
    write_mtp_checkpoint(tmp_path, first_k_dense_replace=NUM_LAYERS + 1)
    assert mtp_config(tmp_path).experts is None
    assert run(load(tmp_path), [NUM_TOKENS]).isfinite().all()


@pytest.mark.parametrize("name", ["llama", "deepseek-v2", "deepseek-v3"])
def test_mtp_config_of_a_checkpoint_without_a_module_is_refused(name: str, tmp_path: Path) -> None:
    write_checkpoint(name, tmp_path)
    change_config(tmp_path, num_nextn_predict_layers=0)
    with pytest.raises(ConfigError, match=r"has no MTP module .*speculate with ngram or a draft model"):
        mtp_config(tmp_path)


def drop_merge(tensors: Tensors) -> None:
    del tensors[f"{PREFIX}eh_proj.weight"]


def drop_norm(tensors: Tensors) -> None:
    del tensors[f"{PREFIX}hnorm.weight"]


def narrow_merge(tensors: Tensors) -> None:
    tensors[f"{PREFIX}eh_proj.weight"] = torch.zeros(HIDDEN_DIM, HIDDEN_DIM)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop_merge, rf"the weights have none \(model\.layers\.{NUM_LAYERS}\.eh_proj\.weight\): take the original"),
        (drop_norm, rf"no tensor model\.layers\.{NUM_LAYERS}\.hnorm\.weight"),
        (narrow_merge, r"eh_proj\.weight has shape \(48, 48\), but config\.json asks for \(48, 96\)"),
    ],
)
def test_mtp_module_with_a_tensor_that_does_not_fit_is_refused_by_its_name(
    change: Callable[[Tensors], None], message: str, tmp_path: Path
) -> None:
    write_mtp_checkpoint(tmp_path)
    tensors = read_tensors(tmp_path)
    (tmp_path / "mtp.safetensors").unlink()
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=message):
        load(tmp_path)
