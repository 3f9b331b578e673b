"""A pass in torch over gathered pages: for models, devices and dtypes without kernels of their own.

In float32 on a CPU the matrix products are those of the native kernels: bits do not depend on the cut over ranks.

Shape suffixes: T tokens of all chunks, Q tokens of one chunk, C cached tokens (with the chunk's own), N query heads,
H KV heads, P pages, K planes, S slots of a page, D head dimension, V value dimension, L cached dimensions of a latent,
E hidden, R chosen rows.
Cost: attention copies the chunk's K and V of one layer.
"""

from collections.abc import Callable, Sequence

import torch

from pdserve.engine.kernel_products import fit_kernels, with_kernels
from pdserve.engine.kv_storage import KvStorage
from pdserve.model.attention import AttendToLatents, attend_causally
from pdserve.model.decoder import Decoder, OnLayer
from pdserve.schedule.batch import Chunk


class TorchExecutor:
    """Kernels use as many threads as torch."""

    def __init__(self, decoder: Decoder, storage: KvStorage) -> None:
        fits = fit_kernels(decoder)
        self._decoder = with_kernels(decoder, num_threads=torch.get_num_threads()) if fits else decoder
        self._storage = storage
        self._device = storage.pages_LPHKSD.device

    @torch.inference_mode()
    def forward(self, chunks: Sequence[Chunk], on_layer: OnLayer) -> torch.Tensor:
        token_ids_T = torch.tensor([token_id for chunk in chunks for token_id in chunk.token_ids])
        positions_T = torch.cat([torch.arange(chunk.start, chunk.stop) for chunk in chunks])
        return self._decoder(
            token_ids_T.to(self._device), positions_T.to(self._device), PagedCache(chunks, self._storage), on_layer
        )

    @torch.inference_mode()
    def final_norm(self, x_RE: torch.Tensor) -> torch.Tensor:
        return self._decoder.final_norm(x_RE)

    @torch.inference_mode()
    def logits(self, normed_RE: torch.Tensor) -> torch.Tensor:
        return self._decoder.logits(normed_RE).float().cpu()


class PagedCache:
    """The cache as the model sees it in one pass."""

    def __init__(self, chunks: Sequence[Chunk], storage: KvStorage) -> None:
        self._chunks = chunks
        self._pages_LPHKSD = storage.pages_LPHKSD
        page_slots = storage.layout.page_slots
        positions = [(chunk, position) for chunk in chunks for position in range(chunk.start, chunk.stop)]
        page_T = torch.tensor([chunk.page_indices[position // page_slots] for chunk, position in positions])
        slot_T = torch.tensor([position % page_slots for _, position in positions])
        device = storage.pages_LPHKSD.device
        self._page_T, self._slot_T = page_T.to(device), slot_T.to(device)

    def attend(self, layer_index: int, q_TND: torch.Tensor, k_THD: torch.Tensor, v_THD: torch.Tensor) -> torch.Tensor:
        pages_PHKSD = self._pages_LPHKSD[layer_index]
        pages_PHKSD[self._page_T, :, 0, self._slot_T] = k_THD
        pages_PHKSD[self._page_T, :, 1, self._slot_T] = v_THD

        def attend_one(chunk: Chunk, q_QND: torch.Tensor) -> torch.Tensor:
            return attend_causally(q_QND, _gather(chunk, pages_PHKSD[:, :, 0]), _gather(chunk, pages_PHKSD[:, :, 1]))

        return self._chunk_by_chunk(q_TND, attend_one)

    def attend_latents(
        self, layer_index: int, q_TND: torch.Tensor, latents_TL: torch.Tensor, attend_one: AttendToLatents
    ) -> torch.Tensor:
        pages_PHSL = self._pages_LPHKSD[layer_index, :, :, 0]
        pages_PHSL[self._page_T, 0, self._slot_T] = latents_TL
        return self._chunk_by_chunk(q_TND, lambda chunk, q_QND: attend_one(q_QND, _gather(chunk, pages_PHSL)[:, 0]))

    def _chunk_by_chunk(
        self, q_TND: torch.Tensor, attend_one: Callable[[Chunk, torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        outputs: list[torch.Tensor] = []
        start = 0
        for chunk in self._chunks:
            stop = start + len(chunk.token_ids)
            outputs.append(attend_one(chunk, q_TND[start:stop]))
            start = stop
        return torch.cat(outputs)


def _gather(chunk: Chunk, pages_PHSD: torch.Tensor) -> torch.Tensor:
    """One plane of the chunk's cached tokens: x_CHD."""
    return pages_PHSD[list(chunk.page_indices)].transpose(1, 2).flatten(0, 1)[: chunk.stop]
