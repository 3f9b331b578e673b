"""A pass on the native CPU kernels, in float32. The same function as `TorchExecutor`, several times faster.

Every sum is made in an order that depends on the row alone (see native/kernels/kernel_table.h), so a token's KV and its
logits have the same bits whatever the chunk cut, the rest of the batch, the number of threads or ranks, or the process.

Shape suffixes: T tokens of all chunks, R chosen rows, C chunks, P pages of the longest chunk's table, E hidden,
Q = (N + 2H) * D packed projection and O = N * D attention output of this rank's heads, F feed-forward, V vocabulary;
W this rank's columns of any of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from pdserve._kernels import CpuKernels, PackedMatrix, PagedCache, PassPlan
from pdserve.engine.kv_storage import KvStorage
from pdserve.errors import InternalError
from pdserve.model.attention import GroupedAttention
from pdserve.model.decoder import Decoder, DecoderLayer, OnLayer
from pdserve.model.feed_forward import FeedForward
from pdserve.model.parallel import Columns
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
        self._communicator = decoder.communicator
        self._cuts = decoder.cuts
        num_heads = len(self._cuts.heads.ours) // config.head_dim
        self._packed_dim = (num_heads + 2 * storage.layout.num_kv_heads) * config.head_dim
        self._kernels = CpuKernels(num_threads, instruction_set)
        self._cache = PagedCache(
            storage.pages_LPHKSD.numpy(),
            decoder.cos_PR.numpy(),
            decoder.sin_PR.numpy(),
            num_heads=num_heads,
        )
        self._embedding_VE = _array(decoder.embedding.weight)
        self._layers = [_pack_layer(layer) for layer in decoder.decoder_layers()]
        self._final_norm_E = _array(decoder.final_norm.weight)
        self._lm_head = PackedMatrix.plain(_array(decoder.lm_head.weight))

    @staticmethod
    def fits(decoder: Decoder) -> bool:
        """Whether the kernels can run this decoder where it is."""
        config, weight = decoder.config, decoder.embedding.weight
        return (
            config.latent is None
            and config.experts is None
            and weight.device.type == "cpu"
            and weight.dtype == torch.float32
            and config.head_dim % _DIM_MULTIPLE == 0
            and config.hidden_dim % _DIM_MULTIPLE == 0
        )

    def forward(self, chunks: Sequence[Chunk], on_layer: OnLayer) -> torch.Tensor:
        kernels, cache, cuts, eps = self._kernels, self._cache, self._cuts, self._eps
        plan = self._plan(chunks)
        token_ids = [token_id for chunk in chunks for token_id in chunk.token_ids]
        num_tokens = len(token_ids)
        x_TE = self._embedding_VE[token_ids]
        normed_TE = np.empty_like(x_TE)
        qkv_TQ = np.empty((num_tokens, self._packed_dim), np.float32)
        o_TO = np.empty((num_tokens, len(cuts.heads.ours)), np.float32)
        gated_TW = np.empty((num_tokens, len(cuts.ffn.ours)), np.float32)
        for layer_index, layer in enumerate(self._layers):
            kernels.rms_norm(x_TE, layer.attention_norm_E, normed_TE, eps)
            kernels.linear(normed_TE, layer.qkv, qkv_TQ)
            kernels.append(cache, plan, layer_index, qkv_TQ, layer.q_norm_D, layer.k_norm_D, eps)
            kernels.attend(cache, plan, layer_index, qkv_TQ, o_TO)
            # A rank gives its heads' outputs only after it has written their KV: here all ranks have.
            self._add_product(self._gather(o_TO, cuts.heads), layer.output, x_TE)
            on_layer(layer_index)
            kernels.rms_norm(x_TE, layer.feed_forward_norm_E, normed_TE, eps)
            kernels.linear(normed_TE, layer.gate_up, gated_TW)
            self._add_product(self._gather(gated_TW, cuts.ffn), layer.down, x_TE)
        return torch.from_numpy(x_TE)  # pyright: ignore[reportUnknownMemberType]

    def final_norm(self, x_RE: torch.Tensor) -> torch.Tensor:
        normed_RE = torch.empty_like(x_RE)
        self._kernels.rms_norm(x_RE.numpy(), self._final_norm_E, normed_RE.numpy(), self._eps)
        return normed_RE

    def logits(self, normed_RE: torch.Tensor) -> torch.Tensor:
        logits_RW = torch.empty(len(normed_RE), len(self._cuts.vocab.ours))
        self._kernels.linear(normed_RE.numpy(), self._lm_head, logits_RW.numpy())
        return self._communicator.gather_columns(logits_RW, self._cuts.vocab.widths)

    def _add_product(self, inputs: Array, weight: PackedMatrix, x_TE: Array) -> None:
        """Adds the product to the residual; both have all hidden columns, on every rank."""
        if self._communicator.num_ranks == 1:
            self._kernels.linear_add(inputs, weight, x_TE)
            return
        product_TW = np.empty((len(x_TE), len(self._cuts.hidden.ours)), np.float32)
        self._kernels.linear(inputs, weight, product_TW)
        x_TE += self._gather(product_TW, self._cuts.hidden)

    def _gather(self, ours_TW: Array, columns: Columns) -> Array:
        ours = torch.from_numpy(ours_TW)  # pyright: ignore[reportUnknownMemberType]
        return self._communicator.gather_columns(ours, columns.widths).numpy()

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
    if not isinstance(attention, GroupedAttention) or not isinstance(feed_forward, FeedForward):
        raise InternalError("the kernels run dense layers with grouped attention only")
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
