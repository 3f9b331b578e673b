"""The memory of a rank that other processes map: KV pages, tails and layer counter.

Shape suffixes: L layers, P pages, H KV heads, 2 (K, V), S slots of a page, D head dimension; I tail slots, E hidden.
"""

from dataclasses import dataclass

import torch

from pdserve.kv.layout import DTYPE_BYTES, KvLayout
from pdserve.layer_counter import REGION_BYTES
from pdserve.shared_region import SharedRegion
from pdserve.units import div_ceil

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

_TAIL_ALIGNMENT = 64
_TAIL_SPARE_BYTES = 64
"""Behind the last tail slot: the fabric's flush writes into the region's last 8 bytes."""


def tail_slot_bytes(*, hidden_dim: int, dtype: str) -> int:
    return div_ceil(hidden_dim * DTYPE_BYTES[dtype], _TAIL_ALIGNMENT) * _TAIL_ALIGNMENT


@dataclass(frozen=True, slots=True, kw_only=True)
class KvStorage:
    """Lifetime: the regions live as long as the process; the tensors are views of them."""

    layout: KvLayout
    num_pages: int
    kv_region: SharedRegion
    tail_region: SharedRegion
    counter_region: SharedRegion
    pages_LPH2SD: torch.Tensor
    tails_IE: torch.Tensor

    @classmethod
    def create(cls, *, layout: KvLayout, num_pages: int, num_tail_slots: int, hidden_dim: int) -> "KvStorage":
        dtype = TORCH_DTYPES[layout.dtype]
        slot_bytes = tail_slot_bytes(hidden_dim=hidden_dim, dtype=layout.dtype)
        kv_region = SharedRegion.create(name="pdserve-kv", num_bytes=layout.region_bytes(num_pages))
        tail_region = SharedRegion.create(
            name="pdserve-tail", num_bytes=num_tail_slots * slot_bytes + _TAIL_SPARE_BYTES
        )
        counter_region = SharedRegion.create(name="pdserve-counter", num_bytes=REGION_BYTES)
        shape = (layout.num_layers, num_pages, layout.num_kv_heads, 2, layout.page_slots, layout.head_dim)
        num_values = layout.region_bytes(num_pages) // DTYPE_BYTES[layout.dtype]
        row_values = slot_bytes // DTYPE_BYTES[layout.dtype]
        tails = torch.frombuffer(tail_region.buffer, dtype=dtype, count=num_tail_slots * row_values)
        return cls(
            layout=layout,
            num_pages=num_pages,
            kv_region=kv_region,
            tail_region=tail_region,
            counter_region=counter_region,
            pages_LPH2SD=torch.frombuffer(kv_region.buffer, dtype=dtype, count=num_values).view(shape),
            tails_IE=tails.view(num_tail_slots, row_values)[:, :hidden_dim],
        )
