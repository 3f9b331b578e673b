"""Copies of a sequence's KV out of a region: for verification, never on the request's way."""

from mmap import mmap

import numpy as np
from numpy.typing import NDArray

from pdserve.kv.layout import KvLayout


def copy_tokens(
    buffer: mmap, layout: KvLayout, *, num_pages: int, page_indices: tuple[int, ...], num_tokens: int
) -> NDArray[np.uint8]:
    """The bytes of the first `num_tokens` tokens.

    Shapes: `[layer][head][K,V][token][byte]`, the same whatever pages the tokens lie in. Cost: one copy of the KV.
    """
    slot_bytes = layout.slot_bytes
    shape = (layout.num_layers, num_pages, layout.num_kv_heads, 2, layout.page_slots, slot_bytes)
    region_bytes = layout.region_bytes(num_pages)
    region = np.frombuffer(buffer, dtype=np.uint8, count=region_bytes).reshape(shape)
    pages = region[:, list(page_indices[: layout.num_pages_for(num_tokens)])]
    by_token = pages.transpose(0, 2, 3, 1, 4, 5).reshape(layout.num_layers, layout.num_kv_heads, 2, -1, slot_bytes)
    return np.ascontiguousarray(by_token[:, :, :, :num_tokens])
