"""The decoder computes what `transformers` computes."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.pure.tiny_checkpoints import CHECKPOINTS, random_tokens, reference_logits, write_checkpoint
from torch.nn import functional

from pdserve.errors import ConfigError
from pdserve.model.attention import AttendToLatents
from pdserve.model.config import read_config
from pdserve.model.decoder import Decoder
from pdserve.model.smollm2 import prepare
from pdserve.model.weights import load_decoder

MAX_DIFFERENCE = 1e-4


class NoCache:
    """One sequence, from its start, without a cache."""

    def attend(self, layer_index: int, q_TND: torch.Tensor, k_THD: torch.Tensor, v_THD: torch.Tensor) -> torch.Tensor:
        q_NTD, k_HTD, v_HTD = (tensor.transpose(0, 1) for tensor in (q_TND, k_THD, v_THD))
        o_NTD = functional.scaled_dot_product_attention(q_NTD, k_HTD, v_HTD, is_causal=True, enable_gqa=True)
        return o_NTD.transpose(0, 1)

    def attend_latents(
        self, layer_index: int, q_TND: torch.Tensor, latents_TL: torch.Tensor, attend_one: AttendToLatents
    ) -> torch.Tensor:
        return attend_one(q_TND, latents_TL)


def load(model_dir: Path) -> Decoder:
    return load_decoder(model_dir, read_config(model_dir), dtype=torch.float32, device=torch.device("cpu"))


def compute_logits(decoder: Decoder, token_ids: list[int]) -> tuple[torch.Tensor, list[int]]:
    """logits_TV, and the layers in the order in which they reported."""
    layers: list[int] = []
    with torch.inference_mode():
        x_TE = decoder(torch.tensor(token_ids), torch.arange(len(token_ids)), NoCache(), layers.append)
        return decoder.logits(decoder.final_norm(x_TE)), layers


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_logits_of_each_architecture_equal_transformers(name: str, tmp_path: Path) -> None:
    reference = write_checkpoint(name, tmp_path)
    token_ids = random_tokens(1, 150)
    logits_TV, layers = compute_logits(load(tmp_path), token_ids)
    assert (logits_TV - reference_logits(reference, token_ids)).abs().max() < MAX_DIFFERENCE
    assert layers == [0, 1, 2]


def test_logits_of_the_default_model_equal_transformers() -> None:
    transformers: Any = pytest.importorskip("transformers")
    model_dir = prepare()
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_dir)
    reference = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    conversation = [{"role": "user", "content": "Name 3 animals that live in the forest."}]
    token_ids = tokenizer.apply_chat_template(conversation, add_generation_prompt=True)
    logits_TV, _ = compute_logits(load(model_dir), token_ids)
    assert (logits_TV - reference_logits(reference, token_ids)).abs().max() < MAX_DIFFERENCE


def test_weights_without_a_tensor_are_refused_with_its_name(tmp_path: Path) -> None:
    write_checkpoint("llama-tied", tmp_path)
    config_path = tmp_path / "config.json"
    config_path.write_text(config_path.read_text().replace("LlamaForCausalLM", "Qwen3ForCausalLM"))
    with pytest.raises(ConfigError, match=r"no tensor model\.layers\.0\.self_attn"):
        load(tmp_path)


def test_weights_of_another_shape_are_refused_with_both_shapes(tmp_path: Path) -> None:
    write_checkpoint("llama-tied", tmp_path)
    config_path = tmp_path / "config.json"
    config_path.write_text(config_path.read_text().replace('"intermediate_size": 80', '"intermediate_size": 96'))
    with pytest.raises(ConfigError, match=r"mlp\.gate_proj.*\(80, 48\).*\(96, 48\)"):
        load(tmp_path)


def test_weights_that_are_no_safetensors_are_refused(tmp_path: Path) -> None:
    write_checkpoint("llama-tied", tmp_path)
    os.truncate(tmp_path / "model.safetensors", 5)
    with pytest.raises(ConfigError, match="not a safetensors file"):
        load(tmp_path)
