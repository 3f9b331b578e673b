"""A pass in plain torch over gathered pages: for devices and dtypes without kernels of their own.

Shape suffixes: T tokens of all chunks, Q tokens of one chunk, C cached tokens (with the chunk's own), N query heads,
H KV heads, G = N / H, S slots of a page, D head dimension, E hidden, V vocabulary.
Cost: attention copies the chunk's K and V of one layer.
"""

from collections.abc import Sequence

import torch
from torch.nn import functional

from pdserve.engine.kv_storage import KvStorage
from pdserve.model.decoder import Decoder, OnLayer
from pdserve.schedule.batch import Chunk


class TorchExecutor:
    def __init__(self, decoder: Decoder, storage: KvStorage) -> None:
        self._decoder = decoder
        self._storage = storage

    @torch.inference_mode()
    def forward(self, chunks: Sequence[Chunk], on_layer: OnLayer) -> torch.Tensor:
        token_ids_T = torch.tensor([token_id for chunk in chunks for token_id in chunk.token_ids])
        positions_T = torch.cat([torch.arange(chunk.start, chunk.stop) for chunk in chunks])
        return self._decoder(token_ids_T, positions_T, _PagedAttention(chunks, self._storage), on_layer)

    @torch.inference_mode()
    def final_norm(self, x_RE: torch.Tensor) -> torch.Tensor:
        return self._decoder.final_norm(x_RE)

    @torch.inference_mode()
    def logits(self, normed_RE: torch.Tensor) -> torch.Tensor:
        return self._decoder.logits(normed_RE).float()


class _PagedAttention:
    def __init__(self, chunks: Sequence[Chunk], storage: KvStorage) -> None:
        self._chunks = chunks
        self._pages_LPH2SD = storage.pages_LPHKSD
        page_slots = storage.layout.page_slots
        positions = [(chunk, position) for chunk in chunks for position in range(chunk.start, chunk.stop)]
        self._page_T = torch.tensor([chunk.page_indices[position // page_slots] for chunk, position in positions])
        self._slot_T = torch.tensor([position % page_slots for _, position in positions])

    def attend(self, layer_index: int, q_TND: torch.Tensor, k_THD: torch.Tensor, v_THD: torch.Tensor) -> torch.Tensor:
        pages_PH2SD = self._pages_LPH2SD[layer_index]
        pages_PH2SD[self._page_T, :, 0, self._slot_T] = k_THD
        pages_PH2SD[self._page_T, :, 1, self._slot_T] = v_THD
        o_TND = torch.empty_like(q_TND)
        start = 0
        for chunk in self._chunks:
            stop = start + len(chunk.token_ids)
            o_TND[start:stop] = _attend_chunk(chunk, q_TND[start:stop], pages_PH2SD)
            start = stop
        return o_TND


def _attend_chunk(chunk: Chunk, q_QND: torch.Tensor, pages_PH2SD: torch.Tensor) -> torch.Tensor:
    gathered_PH2SD = pages_PH2SD[list(chunk.page_indices)]
    kv_2HCD = gathered_PH2SD.permute(2, 1, 0, 3, 4).flatten(2, 3)[:, :, : chunk.stop]
    mask_QC = torch.arange(chunk.stop)[None, :] <= torch.arange(chunk.start, chunk.stop)[:, None]
    o_NQD = functional.scaled_dot_product_attention(
        q_QND.transpose(0, 1), kv_2HCD[0], kv_2HCD[1], attn_mask=mask_QC, enable_gqa=True
    )
    return o_NQD.transpose(0, 1)
