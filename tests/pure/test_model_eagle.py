"""EAGLE heads, against their formula around layers of `transformers`, which has none.

Source of the formula: EAGLE (arXiv 2401.15077), section 4.1.

Shape suffixes: T tokens, E hidden, V vocabulary.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType]
from tests.pure.test_model_mtp import HIDDEN_DIM, MAX_DIFFERENCE, NUM_TOKENS, inputs, run
from tests.pure.tiny_checkpoints import change_config, read_tensors, write_checkpoint, write_eagle_head

from pdserve.errors import ConfigError
from pdserve.model.config import read_config
from pdserve.model.draft_head_config import eagle_config
from pdserve.model.eagle import EagleHead, load_eagle

VARIANTS: dict[str, dict[str, Any]] = {
    "as published": {"has_bias": True, "has_embedding": True},
    "with nothing of its own": {},
    "with a prefix": {"prefix": "model.", "has_bias": True, "has_first_norm": True, "has_embedding": True},
    "with a first norm": {"has_first_norm": True},
    "of two layers": {"num_layers": 2},
    "of Qwen2": {"has_qkv_bias": True},
}


@pytest.fixture
def dirs(tmp_path: Path) -> tuple[Path, Path]:
    """Of the head and of the model."""
    for name in ("head", "target"):
        (tmp_path / name).mkdir()
    return tmp_path / "head", tmp_path / "target"


def load(head_dir: Path, target_dir: Path) -> EagleHead:
    target = read_config(target_dir)
    return load_eagle(head_dir, target_dir, target, dtype=torch.float32, device=torch.device("cpu"))


@torch.inference_mode()
def reference(head_dir: Path, target_dir: Path, layers: Any, *, prefix: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(states_TE, logits_TV)"""
    own, target = read_tensors(head_dir), read_tensors(target_dir)
    token_ids_T, previous_TE = inputs()
    embedding_VE = own.get(f"{prefix}embed_tokens.weight", target["model.embed_tokens.weight"])
    merged_TE = torch.cat((embedding_VE[token_ids_T], previous_TE), dim=1) @ own[f"{prefix}fc.weight"].T
    if f"{prefix}fc.bias" in own:
        merged_TE = merged_TE + own[f"{prefix}fc.bias"]
    states_TE = layers(inputs_embeds=merged_TE[None], use_cache=False).last_hidden_state[0]
    return states_TE, states_TE @ target.get("lm_head.weight", target["model.embed_tokens.weight"]).T


@pytest.mark.parametrize("target", ["llama", "llama-tied"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_eagle_head_computes_the_formula_with_the_head_of_the_model(
    variant: str, target: str, dirs: tuple[Path, Path]
) -> None:
    write_checkpoint(target, dirs[1])
    layers = write_eagle_head(dirs[0], **VARIANTS[variant])
    expected_TE, expected_TV = reference(*dirs, layers, prefix=VARIANTS[variant].get("prefix", ""))
    head = load(*dirs)
    states_TE = run(head, [NUM_TOKENS])
    assert (states_TE - expected_TE).abs().max() < MAX_DIFFERENCE * expected_TE.std()
    assert (head.logits(states_TE) - expected_TV).abs().max() < MAX_DIFFERENCE * expected_TV.std()


def test_eagle_head_in_chunks_equals_the_whole(dirs: tuple[Path, Path]) -> None:
    write_checkpoint("llama", dirs[1])
    write_eagle_head(dirs[0], num_layers=2)
    head = load(*dirs)
    whole_TE = run(head, [NUM_TOKENS])
    for stops in ([1, 2, 20, NUM_TOKENS], list(range(1, NUM_TOKENS + 1))):
        assert (run(head, stops) - whole_TE).abs().max() < MAX_DIFFERENCE * whole_TE.std()


def test_eagle_config_serves_prompts_as_long_as_the_model_does(dirs: tuple[Path, Path]) -> None:
    write_checkpoint("llama", dirs[1])
    write_eagle_head(dirs[0])
    target = replace(read_config(dirs[1]), max_model_len=1000)
    config = eagle_config(dirs[0], target)
    assert (config.num_layers, config.max_model_len) == (1, 1000)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "is an EAGLE-3 head, which is not supported"),
        ({"draft_vocab_size": 64}, "is an EAGLE-3 head, which is not supported"),
        ({"architectures": ["MedusaModel"]}, "MedusaModel.* is no EAGLE head; known are LlamaForCausalLM"),
        ({"add_para_norm": True}, "add_para_norm .* is not supported"),
        ({"hidden_size": 96}, "hidden_size 96 is not the model's, 48: name a head that was trained for this model"),
        ({"vocab_size": 130}, "vocab_size 130 is not the model's, 131"),
    ],
)
def test_eagle_head_for_something_else_is_refused_by_name(
    changes: dict[str, object], message: str, dirs: tuple[Path, Path]
) -> None:
    write_checkpoint("llama", dirs[1])
    write_eagle_head(dirs[0])
    change_config(dirs[0], **changes)
    with pytest.raises(ConfigError, match=message):
        eagle_config(dirs[0], read_config(dirs[1]))


def test_eagle_head_in_a_pickle_is_refused_with_what_to_do(dirs: tuple[Path, Path]) -> None:
    write_checkpoint("llama", dirs[1])
    write_eagle_head(dirs[0])
    (dirs[0] / "model.safetensors").rename(dirs[0] / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"pytorch_model\.bin is a pickle, .* convert it with safetensors"):
        eagle_config(dirs[0], read_config(dirs[1]))


def test_eagle_head_with_the_tensors_of_eagle_3_is_refused_whatever_its_config_says(dirs: tuple[Path, Path]) -> None:
    write_checkpoint("llama", dirs[1])
    write_eagle_head(dirs[0])
    save_file({**read_tensors(dirs[0]), "d2t": torch.zeros(64, dtype=torch.int64)}, dirs[0] / "model.safetensors")
    with pytest.raises(ConfigError, match="is an EAGLE-3 head, which is not supported"):
        load(*dirs)


def test_eagle_head_that_reads_three_hidden_states_is_refused(dirs: tuple[Path, Path]) -> None:
    write_checkpoint("llama", dirs[1])
    write_eagle_head(dirs[0])
    tensors = {**read_tensors(dirs[0]), "fc.weight": torch.zeros(HIDDEN_DIM, 3 * HIDDEN_DIM)}
    save_file(tensors, dirs[0] / "model.safetensors")
    with pytest.raises(ConfigError, match=r"fc\.weight has shape \(48, 144\), but config\.json asks for \(48, 96\)"):
        load(*dirs)
