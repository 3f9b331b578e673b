"""Seeded heads for the checkpoints of `tiny_checkpoints`: an EAGLE head, and an MTP module."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file  # pyright: ignore[reportUnknownVariableType]
from tests.pure.tiny_checkpoints import NUM_LAYERS, VOCAB_SIZE, write_checkpoint

HIDDEN_DIM = 48
_HEAD_DIM, _NUM_HEADS, _NUM_KV_HEADS, _FFN_DIM = 16, 6, 2, 80


def write_eagle(head_dir: Path, *, seed: int = 1, hidden_dim: int = HIDDEN_DIM, vocab_size: int = VOCAB_SIZE) -> None:
    """For any of the checkpoints."""
    fields = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": hidden_dim,
        "num_attention_heads": _NUM_HEADS,
        "num_key_value_heads": _NUM_KV_HEADS,
        "head_dim": _HEAD_DIM,
        "intermediate_size": _FFN_DIM,
        "num_hidden_layers": 1,
        "vocab_size": vocab_size,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
    }
    shapes = {
        "fc.weight": (hidden_dim, 2 * hidden_dim),
        "layers.0.self_attn.q_proj.weight": (_NUM_HEADS * _HEAD_DIM, hidden_dim),
        "layers.0.self_attn.k_proj.weight": (_NUM_KV_HEADS * _HEAD_DIM, hidden_dim),
        "layers.0.self_attn.v_proj.weight": (_NUM_KV_HEADS * _HEAD_DIM, hidden_dim),
        "layers.0.self_attn.o_proj.weight": (hidden_dim, _NUM_HEADS * _HEAD_DIM),
        "layers.0.mlp.gate_proj.weight": (_FFN_DIM, hidden_dim),
        "layers.0.mlp.up_proj.weight": (_FFN_DIM, hidden_dim),
        "layers.0.mlp.down_proj.weight": (hidden_dim, _FFN_DIM),
    }
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: torch.randn(shape, generator=generator) * 0.3 for name, shape in shapes.items()}
    tensors["layers.0.post_attention_layernorm.weight"] = torch.ones(hidden_dim)
    head_dir.mkdir(parents=True, exist_ok=True)
    (head_dir / "config.json").write_text(json.dumps(fields))
    save_file(tensors, head_dir / "model.safetensors")


def write_deepseek_with_mtp(model_dir: Path, *, seed: int = 1) -> None:
    """A DeepSeek-V3 checkpoint. The module is the last layer again, with a projection of its own."""
    write_checkpoint("deepseek-v3", model_dir)
    config_path, weights_path = model_dir / "config.json", model_dir / "model.safetensors"
    config_path.write_text(json.dumps(json.loads(config_path.read_text()) | {"num_nextn_predict_layers": 1}))
    last, extra = f"model.layers.{NUM_LAYERS - 1}.", f"model.layers.{NUM_LAYERS}."
    tensors = load_file(weights_path)
    tensors |= {extra + name.removeprefix(last): tensors[name].clone() for name in tensors if name.startswith(last)}
    for name in ("enorm", "hnorm", "shared_head.norm"):
        tensors[f"{extra}{name}.weight"] = torch.ones(HIDDEN_DIM)
    generator = torch.Generator().manual_seed(seed)
    tensors[f"{extra}eh_proj.weight"] = torch.randn(HIDDEN_DIM, 2 * HIDDEN_DIM, generator=generator) * 0.3
    save_file(tensors, weights_path, metadata={"format": "pt"})
