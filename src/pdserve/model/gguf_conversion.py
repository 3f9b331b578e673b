"""A GGUF file of a Llama with a GPT-2 style tokenizer, written out as a Hugging Face directory in float32.

Three things differ between the two formats: GGUF names dimensions from the fastest varying one, permutes the rows of
the Q and K projections for a rotary embedding over neighbouring pairs, and keeps the tokenizer as flat lists.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, TokenType
from gguf.quants import dequantize
from numpy.typing import NDArray
from safetensors.numpy import save_file  # pyright: ignore[reportUnknownVariableType]
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

_EPS_FIELD = "llama.attention.layer_norm_rms_epsilon"

_OUTER_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}


def convert_gguf(gguf_path: Path, target_dir: Path) -> None:
    """Writes weights, config, generation config, tokenizer and tokenizer config into an existing directory."""
    reader = GGUFReader(gguf_path)
    save_file(_tensors(reader), target_dir / "model.safetensors", metadata={"format": "pt"})
    _write_json(target_dir / "config.json", _config(reader))
    _write_json(target_dir / "generation_config.json", _token_ids(reader))
    _tokenizer(reader).save(str(target_dir / "tokenizer.json"))  # pyright: ignore[reportUnknownMemberType]
    _write_json(target_dir / "tokenizer_config.json", _tokenizer_config(reader))


def interleaved_to_half_split(rows: NDArray[np.float32], *, num_heads: int) -> NDArray[np.float32]:
    """Rows of a projection: in each head from (0, D/2, 1, D/2 + 1, ...) back to (0, 1, ..., D - 1)."""
    num_rows, num_columns = rows.shape
    pairs = rows.reshape(num_heads, num_rows // num_heads // 2, 2, num_columns)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(num_rows, num_columns)


def _field(reader: GGUFReader, name: str) -> Any:
    field = reader.get_field(name)
    if field is None:
        raise ValueError(f"the GGUF file has no field {name}")
    return field.contents()


def _tensors(reader: GGUFReader) -> dict[str, NDArray[np.float32]]:
    heads = {
        "attn_q.weight": int(_field(reader, "llama.attention.head_count")),
        "attn_k.weight": int(_field(reader, "llama.attention.head_count_kv")),
    }
    tensors: dict[str, NDArray[np.float32]] = {}
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        values = values.reshape([int(extent) for extent in reversed(tensor.shape)])
        if tensor.name in _OUTER_NAMES:
            tensors[_OUTER_NAMES[tensor.name]] = values
            continue
        _, layer_index, leaf = tensor.name.split(".", 2)
        if leaf in heads:
            values = interleaved_to_half_split(values, num_heads=heads[leaf])
        tensors[f"model.layers.{layer_index}.{_LAYER_NAMES[leaf]}"] = np.ascontiguousarray(values)
    return tensors


def _config(reader: GGUFReader) -> dict[str, object]:
    return _token_ids(reader) | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_act": "silu",
        "hidden_size": _field(reader, "llama.embedding_length"),
        "intermediate_size": _field(reader, "llama.feed_forward_length"),
        "max_position_embeddings": _field(reader, "llama.context_length"),
        "num_attention_heads": _field(reader, "llama.attention.head_count"),
        "num_hidden_layers": _field(reader, "llama.block_count"),
        "num_key_value_heads": _field(reader, "llama.attention.head_count_kv"),
        # Stored as float32, in which 1e-5 reads back as 9.9999997e-06.
        "rms_norm_eps": float(np.format_float_positional(np.float32(_field(reader, _EPS_FIELD)), unique=True)),
        "rope_theta": float(_field(reader, "llama.rope.freq_base")),
        "rope_scaling": None,
        "tie_word_embeddings": all(tensor.name != "output.weight" for tensor in reader.tensors),
        "torch_dtype": "float32",
        "vocab_size": _field(reader, "llama.vocab_size"),
    }


def _token_ids(reader: GGUFReader) -> dict[str, object]:
    return {
        f"{role}_token_id": _field(reader, f"tokenizer.ggml.{name}_token_id")
        for role, name in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
    }


def _tokenizer(reader: GGUFReader) -> Tokenizer:
    """Byte-level BPE whose pre-tokenizer first splits off each digit; no token is added around a text."""
    pre_tokenizer = _field(reader, "tokenizer.ggml.pre")
    if pre_tokenizer != "smollm":
        raise ValueError(f"the GGUF file uses the pre-tokenizer {pre_tokenizer!r}, which this conversion does not know")
    tokens: list[str] = _field(reader, "tokenizer.ggml.tokens")
    merges: list[str] = _field(reader, "tokenizer.ggml.merges")
    kinds: list[int] = _field(reader, "tokenizer.ggml.token_type")
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    pairs = [(left, right) for left, right in (merge.split(" ") for merge in merges)]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == TokenType.CONTROL]
    added = [AddedToken(token, special=True, normalized=False) for token in special]
    tokenizer.add_special_tokens(added)  # pyright: ignore[reportUnknownMemberType]
    return tokenizer


def _tokenizer_config(reader: GGUFReader) -> dict[str, object]:
    tokens: list[str] = _field(reader, "tokenizer.ggml.tokens")
    kinds: list[int] = _field(reader, "tokenizer.ggml.token_type")
    special = {
        str(token_id): {"content": token, "special": True, "normalized": False, "lstrip": False, "rstrip": False}
        for token_id, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind == TokenType.CONTROL
    }
    return {
        "added_tokens_decoder": special,
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
        "bos_token": tokens[_field(reader, "tokenizer.ggml.bos_token_id")],
        "eos_token": tokens[_field(reader, "tokenizer.ggml.eos_token_id")],
        "pad_token": tokens[_field(reader, "tokenizer.ggml.padding_token_id")],
        "unk_token": tokens[_field(reader, "tokenizer.ggml.unknown_token_id")],
        "chat_template": _field(reader, "tokenizer.chat_template"),
        "clean_up_tokenization_spaces": False,
        "model_max_length": _field(reader, "llama.context_length"),
        "tokenizer_class": "GPT2Tokenizer",
    }


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")
