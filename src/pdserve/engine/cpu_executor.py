"""A pass on the native CPU kernels, in float32. The same function as `TorchExecutor`, several times faster.

Every sum is made in an order that depends on the row alone (see native/kernels/kernel_table.h), so a token's KV and its
logits have the same bits whatever the chunk cut, the rest of the batch, the number of threads or the process.

Shape suffixes: T tokens of all chunks, R chosen rows, C chunks, P pages of the longest chunk's table, E hidden,
Q = (N + 2H) * D packed projection, O = N * D attention output, F feed-forward, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from pdserve._kernels import CpuKernels, PackedMatrix, PagedCache, PassPlan
from pdserve.engine.kv_storage import KvStorage
from pdserve.model.decoder import Decoder, DecoderLayer, OnLayer
from pdserve.schedule.batch import Chunk

Array = NDArray[np.float32]

_DIM_MULTIPLE = 16
"""Lanes of the kernels' blocks; head and hidden dimension are whole numbers of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _LayerWeights:
    attention_norm_E: Array
    qkv: PackedMatrix
    q_norm_D: Array | None
    k_norm_D: Array | None
    output: PackedMatrix
    feed_forward_norm_E: Array
    gate_up: PackedMatrix
    down: PackedMatrix


class CpuExecutor:
    """Requires: `fits(decoder)`. Keeps the weights packed, and of the decoder only the embedding."""

    def __init__(self, decoder: Decoder, storage: KvStorage, *, num_threads: int, instruction_set: str = "") -> None:
        config = decoder.config
        self._eps = config.norm_eps
        self._ffn_dim = config.ffn_dim
        self._output_dim = config.num_heads * config.head_dim
        self._packed_dim = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        self._kernels = CpuKernels(num_threads, instruction_set)
        self._cache = PagedCache(
            storage.pages_LPH2SD.numpy(),
            decoder.cos_PR.numpy(),
            decoder.sin_PR.numpy(),
            num_heads=config.num_heads,
        )
        self._embedding_VE = _array(decoder.embedding.weight)
        self._layers = [_pack_layer(layer) for layer in decoder.decoder_layers()]
        self._final_norm_E = _array(decoder.final_norm.weight)
        self._lm_head = PackedMatrix.plain(_array(decoder.lm_head.weight))
        self._vocab_size = config.vocab_size

    @staticmethod
    def fits(decoder: Decoder) -> bool:
        """Whether the kernels can run this decoder where it is."""
        config, weight = decoder.config, decoder.embedding.weight
        return (
            weight.device.type == "cpu"
            and weight.dtype == torch.float32
            and config.head_dim % _DIM_MULTIPLE == 0
            and config.hidden_dim % _DIM_MULTIPLE == 0
        )

    def forward(self, chunks: Sequence[Chunk], on_layer: OnLayer) -> torch.Tensor:
        kernels, cache, eps = self._kernels, self._cache, self._eps
        plan = self._plan(chunks)
        token_ids = [token_id for chunk in chunks for token_id in chunk.token_ids]
        x_TE = self._embedding_VE[token_ids]
        normed_TE = np.empty_like(x_TE)
        qkv_TQ = np.empty((len(token_ids), self._packed_dim), np.float32)
        o_TO = np.empty((len(token_ids), self._output_dim), np.float32)
        gated_TF = np.empty((len(token_ids), self._ffn_dim), np.float32)
        for layer_index, layer in enumerate(self._layers):
            kernels.rms_norm(x_TE, layer.attention_norm_E, normed_TE, eps)
            kernels.linear(normed_TE, layer.qkv, qkv_TQ)
            kernels.append(cache, plan, layer_index, qkv_TQ, layer.q_norm_D, layer.k_norm_D, eps)
            kernels.attend(cache, plan, layer_index, qkv_TQ, o_TO)
            kernels.linear_add(o_TO, layer.output, x_TE)
            on_layer(layer_index)
            kernels.rms_norm(x_TE, layer.feed_forward_norm_E, normed_TE, eps)
            kernels.linear(normed_TE, layer.gate_up, gated_TF)
            kernels.linear_add(gated_TF, layer.down, x_TE)
        return torch.from_numpy(x_TE)  # pyright: ignore[reportUnknownMemberType]

    def final_norm(self, x_RE: torch.Tensor) -> torch.Tensor:
        normed_RE = torch.empty_like(x_RE)
        self._kernels.rms_norm(x_RE.numpy(), self._final_norm_E, normed_RE.numpy(), self._eps)
        return normed_RE

    def logits(self, normed_RE: torch.Tensor) -> torch.Tensor:
        logits_RV = torch.empty(len(normed_RE), self._vocab_size)
        self._kernels.linear(normed_RE.numpy(), self._lm_head, logits_RV.numpy())
        return logits_RV

    def _plan(self, chunks: Sequence[Chunk]) -> PassPlan:
        page_tables_CP = np.zeros((len(chunks), max(len(chunk.page_indices) for chunk in chunks)), np.int32)
        for row, chunk in enumerate(chunks):
            page_tables_CP[row, : len(chunk.page_indices)] = chunk.page_indices
        return self._cache.plan(
            np.array([chunk.start for chunk in chunks], np.int32),
            np.array([len(chunk.token_ids) for chunk in chunks], np.int32),
            page_tables_CP,
        )


def _pack_layer(layer: DecoderLayer) -> _LayerWeights:
    attention, feed_forward = layer.attention, layer.feed_forward
    gate_FE, up_FE = feed_forward.gate_up.weight.chunk(2)
    return _LayerWeights(
        attention_norm_E=_array(layer.attention_norm.weight),
        qkv=PackedMatrix.plain(_array(attention.qkv.weight), _optional_array(attention.qkv.bias)),
        q_norm_D=_optional_array(attention.q_norm.weight if attention.q_norm is not None else None),
        k_norm_D=_optional_array(attention.k_norm.weight if attention.k_norm is not None else None),
        output=PackedMatrix.plain(_array(attention.output.weight)),
        feed_forward_norm_E=_array(layer.feed_forward_norm.weight),
        gate_up=PackedMatrix.swiglu(_array(gate_FE), _array(up_FE)),
        down=PackedMatrix.plain(_array(feed_forward.down.weight)),
    )


def _array(tensor: torch.Tensor) -> Array:
    return tensor.detach().contiguous().numpy()


def _optional_array(tensor: torch.Tensor | None) -> Array | None:
    return None if tensor is None else _array(tensor)
