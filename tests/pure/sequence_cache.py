"""A KV cache of one sequence, without pages: the keys and values of each layer, one after another."""

import torch

from pdserve.model.attention import AttendToLatents, attend_causally


class SequenceCache:
    def __init__(self) -> None:
        self._planes: dict[tuple[int, str], torch.Tensor] = {}

    def attend(self, layer_index: int, q_TND: torch.Tensor, k_THD: torch.Tensor, v_THD: torch.Tensor) -> torch.Tensor:
        return attend_causally(q_TND, self._appended(layer_index, "k", k_THD), self._appended(layer_index, "v", v_THD))

    def attend_latents(
        self, layer_index: int, q_TND: torch.Tensor, latents_TL: torch.Tensor, attend_one: AttendToLatents
    ) -> torch.Tensor:
        return attend_one(q_TND, self._appended(layer_index, "latent", latents_TL))

    def _appended(self, layer_index: int, plane: str, new: torch.Tensor) -> torch.Tensor:
        """All of the layer's so far."""
        key = layer_index, plane
        self._planes[key] = torch.cat((self._planes.get(key, new[:0]), new))
        return self._planes[key]
