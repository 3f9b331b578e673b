"""Heads that guess some of a tiny model's text from its hidden states, and the model whose text can be so guessed.

Nothing can guess the text of a random model. In this one the next token is mostly a function of the last two, made up
of three parts of the hidden dimension: one holds the token, one a constant, and into the third the first layer copies
from the token before, by attention that looks at positions alone. The other layers are random and small: they decide
between the candidates, so that a guess can be wrong.

A head has the token itself, and the one before only out of the hidden state: with a stale one, or one of another
position, its first guess is seldom right. It is fitted by least squares, so that it takes a second.

Of the first guesses in greedy text (1,000 of them, after random and natural prompts) 51% are right with the MTP module
and 59% with the EAGLE head; with the hidden state of one position earlier or later 5 to 7%, with zeros 9 to 14%.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]

NUM_TOKEN_DIMS = 47
_CONSTANT_DIM = NUM_TOKEN_DIMS
_COPY = slice(NUM_TOKEN_DIMS + 1, None)

_TOKEN_NORM, _CONSTANT = 8.0, 3.0
_COPY_SCALE = 1.5
"""The copy is then about as large as the token."""
_LAYER_SCALE = 0.07
"""Of what random layers add: with more, fewer guesses are right."""

_SHARPNESS = 10.0
_PAIR_WEIGHTS = (2.0, 1.0, 1.0, 1.0)
"""Of the rotary pairs, fastest first, by which the first layer finds the position before: no other position within
the context scores as high for all of them. With this sharpness 98% of the attention is there."""

_NUM_FITTED = 40, 100
"""Sequences and their tokens."""
_RIDGE = 1e-3
"""Keeps dimensions that are always 0 out of the solution."""


def parameters_of(network: Any) -> dict[str, Array]:
    """Views: what is written to them is written to the network."""
    return {name: parameter.detach().numpy() for name, parameter in network.named_parameters()}


def follow_two_tokens(network: Any, random: np.random.Generator) -> None:
    """Makes the text of a DeepSeek network a function of the last two tokens, for the most part."""
    weights = parameters_of(network)
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight *= _LAYER_SCALE
    embedding = weights["model.embed_tokens.weight"]
    tokens = random.standard_normal((len(embedding), NUM_TOKEN_DIMS))
    embedding[:] = 0
    embedding[:, :NUM_TOKEN_DIMS] = tokens / np.linalg.norm(tokens, axis=1, keepdims=True) * _TOKEN_NORM
    embedding[:, _CONSTANT_DIM] = _CONSTANT
    frequencies = network.model.rotary_emb.inv_freq.numpy()
    _copy_previous(weights, "model.layers.0.self_attn.", network.config, frequencies)


def _copy_previous(weights: Mapping[str, Array], prefix: str, config: Any, frequencies: Array) -> None:
    """Every query is the same, and every key, but for the rotation; the query is turned back by one position."""
    for name in ("q_a_proj.weight", "q_b_proj.weight"):
        weights[prefix + name][:] = 0
    weights[prefix + "q_a_proj.weight"][0, _CONSTANT_DIM] = 1.0
    # Normed, a query with one nonzero dimension is the root of their number there.
    unit = 1.0 / (weights[prefix + "q_a_layernorm.weight"][0] * config.q_lora_rank**0.5)
    query = weights[prefix + "q_b_proj.weight"].reshape(config.num_attention_heads, -1, config.q_lora_rank)
    key = weights[prefix + "kv_a_proj_with_mqa.weight"][config.kv_lora_rank :]
    key[:] = 0
    for pair, (weight, angle) in enumerate(zip(_PAIR_WEIGHTS, frequencies, strict=False)):
        first = config.qk_nope_head_dim + 2 * pair
        query[:, first, 0] = np.cos(angle) * unit * weight * _SHARPNESS
        query[:, first + 1, 0] = -np.sin(angle) * unit * weight * _SHARPNESS
        key[2 * pair, _CONSTANT_DIM] = 1.0
    output = weights[prefix + "o_proj.weight"]
    output[: _COPY.start] = 0
    output[_COPY] *= _COPY_SCALE / _LAYER_SCALE


class HiddenStates:
    """Of random tokens, by the model that a head is fitted to: what the head has, and what it is to come to.

    Shapes: [pairs, hidden dimension].
    """

    def __init__(self, network: Any, random: np.random.Generator) -> None:
        token_ids = random.integers(network.config.vocab_size, size=_NUM_FITTED)
        embedding = network.model.embed_tokens.weight
        hidden = network.model(embedding.new_tensor(token_ids).long()).last_hidden_state.detach().numpy()
        hidden_dim = hidden.shape[-1]
        self.embedded: Array = embedding.detach().numpy()[token_ids[:, 1:]].reshape(-1, hidden_dim)
        self.previous: Array = hidden[:, :-1].reshape(-1, hidden_dim)
        self.wanted: Array = hidden[:, 1:].reshape(-1, hidden_dim)


def fit_mtp(
    layer: Mapping[str, Array], states: HiddenStates, *, final_norm: Array, random: np.random.Generator
) -> dict[str, Array]:
    """Tensors of an MTP module around a random layer, which adds too little to be reckoned with; without a prefix."""
    embedding_norm, previous_norm = (random.uniform(0.8, 1.2, len(final_norm)).astype(np.float32) for _ in range(2))
    inputs = _normed(states.embedded) * embedding_norm, _normed(states.previous) * previous_norm
    return {
        **layer,
        "enorm.weight": embedding_norm,
        "hnorm.weight": previous_norm,
        "eh_proj.weight": _fit(*inputs, states.wanted / final_norm),
        "shared_head.norm.weight": final_norm,
    }


def fit_eagle(layer: Mapping[str, Array], states: HiddenStates) -> dict[str, Array]:
    """Tensors of an EAGLE head around a random layer."""
    own = {f"layers.0.{name}": weight for name, weight in layer.items() if name != "input_layernorm.weight"}
    return {**own, "fc.weight": _fit(states.embedded, states.previous, states.wanted)}


def _fit(embedded: Array, previous: Array, wanted: Array) -> Array:
    """The weight of the product of `[embedded, previous]` that comes nearest to what is wanted."""
    inputs = np.concatenate((embedded, previous), axis=1).astype(np.float64)
    squares = inputs.T @ inputs + _RIDGE * np.eye(inputs.shape[1])
    return np.ascontiguousarray(np.linalg.solve(squares, inputs.T @ wanted).T, dtype=np.float32)


def _normed(x: Array) -> Array:
    return x / np.sqrt(np.mean(np.square(x), axis=1, keepdims=True))
