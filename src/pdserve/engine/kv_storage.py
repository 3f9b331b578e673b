"""The memory of a rank that other processes map: KV pages, and on rank 0 tails and layer counter.

Shape suffixes: L layers, P pages, H KV heads of the rank, K planes (K and V, or the latent alone), S slots of a page,
D head dimension; I tail slots, E hidden.
"""

from dataclasses import dataclass

import torch

from pdserve.engine.shape import tail_slot_bytes
from pdserve.kv.layout import DTYPE_BYTES, KvLayout
from pdserve.layer_counter import REGION_BYTES
from pdserve.shared_region import SharedRegion

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

_SPARE_BYTES = 64
"""Behind the last page and the last tail slot: the fabric's flush writes into a region's last 8 bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvStorage:
    """Lifetime: the region lives as long as the process; the tensor is a view of it."""

    layout: KvLayout
    """Of this rank."""
    num_pages: int
    region: SharedRegion
    pages_LPHKSD: torch.Tensor

    @classmethod
    def create(cls, *, layout: KvLayout, num_pages: int) -> "KvStorage":
        region_bytes = layout.region_bytes(num_pages)
        region = SharedRegion.create(name="pdserve-kv", num_bytes=region_bytes + _SPARE_BYTES)
        values = torch.frombuffer(
            region.buffer, dtype=TORCH_DTYPES[layout.dtype], count=region_bytes // DTYPE_BYTES[layout.dtype]
        )
        return cls(
            layout=layout,
            num_pages=num_pages,
            region=region,
            pages_LPHKSD=values.view(
                layout.num_layers,
                num_pages,
                layout.num_kv_heads,
                layout.num_planes,
                layout.page_slots,
                layout.head_dim,
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LeadStorage:
    """What rank 0 has beside its pages. Lifetime: as of `KvStorage`."""

    tail_region: SharedRegion
    counter_region: SharedRegion
    tails_IE: torch.Tensor

    @classmethod
    def create(cls, *, num_tail_slots: int, hidden_dim: int, dtype: str) -> "LeadStorage":
        slot_bytes = tail_slot_bytes(hidden_dim=hidden_dim, dtype=dtype)
        row_values = slot_bytes // DTYPE_BYTES[dtype]
        tail_region = SharedRegion.create(name="pdserve-tail", num_bytes=num_tail_slots * slot_bytes + _SPARE_BYTES)
        tails = torch.frombuffer(tail_region.buffer, dtype=TORCH_DTYPES[dtype], count=num_tail_slots * row_values)
        return cls(
            tail_region=tail_region,
            counter_region=SharedRegion.create(name="pdserve-counter", num_bytes=REGION_BYTES),
            tails_IE=tails.view(num_tail_slots, row_values)[:, :hidden_dim],
        )
