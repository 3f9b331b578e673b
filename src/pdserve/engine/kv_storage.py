"""The memory of a rank that other processes map: KV pages, and on rank 0 tails and layer counter.

Shape suffixes: L layers, P pages, H KV heads of the rank, K planes (K and V, or the latent alone), S slots of a page,
D head dimension; I tail slots, E hidden.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from pdserve.engine.cuda_region import CudaRegion
from pdserve.engine.region import Region, create_region
from pdserve.engine.shape import SPARE_BYTES, kv_region_bytes, tail_slot_bytes
from pdserve.errors import InternalError
from pdserve.kv.layout import DTYPE_BYTES, KvLayout
from pdserve.layer_counter import REGION_BYTES
from pdserve.schedule.batch import PageCopy
from pdserve.shared_region import SharedRegion

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class KvStorage:
    """Lifetime: the region lives as long as the process; the tensor is a view of it."""

    layout: KvLayout
    """Of this rank."""
    num_pages: int
    region: Region
    pages_LPHKSD: torch.Tensor

    @classmethod
    def create(
        cls, *, layout: KvLayout, num_pages: int, name: str = "pdserve-kv", cuda_device: int | None = None
    ) -> "KvStorage":
        """Raises: `ConfigError` when the device has not so much memory."""
        region = create_region(
            name=name, num_bytes=kv_region_bytes(layout, num_pages=num_pages), cuda_device=cuda_device
        )
        num_values = layout.region_bytes(num_pages) // DTYPE_BYTES[layout.dtype]
        values = _values_of(region, TORCH_DTYPES[layout.dtype], num_values)
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

    def copy_pages(self, copies: Iterable[PageCopy]) -> None:
        """All bytes of each page, in order: a page may be copied on."""
        for copy in copies:
            self.pages_LPHKSD[:, copy.target] = self.pages_LPHKSD[:, copy.source]


@dataclass(frozen=True, slots=True, kw_only=True)
class LeadStorage:
    """What rank 0 has beside its pages, in host memory on every device: a tail is a few KiB, and copied once a prompt.

    Lifetime: as of `KvStorage`.
    """

    tail_region: SharedRegion
    counter_region: SharedRegion
    tails_IE: torch.Tensor

    @classmethod
    def create(cls, *, num_tail_slots: int, hidden_dim: int, dtype: str) -> "LeadStorage":
        slot_bytes = tail_slot_bytes(hidden_dim=hidden_dim, dtype=dtype)
        row_values = slot_bytes // DTYPE_BYTES[dtype]
        tail_region = SharedRegion.create(name="pdserve-tail", num_bytes=num_tail_slots * slot_bytes + SPARE_BYTES)
        tails = _values_of(tail_region, TORCH_DTYPES[dtype], num_tail_slots * row_values)
        return cls(
            tail_region=tail_region,
            counter_region=SharedRegion.create(name="pdserve-counter", num_bytes=REGION_BYTES),
            tails_IE=tails.view(num_tail_slots, row_values)[:, :hidden_dim],
        )


def _values_of(region: Region, dtype: torch.dtype, num_values: int) -> torch.Tensor:
    """The first values in the region, not copied."""
    match region:
        case SharedRegion():
            return torch.frombuffer(region.buffer, dtype=dtype, count=num_values)
        case CudaRegion():
            return _device_bytes(region)[: num_values * dtype.itemsize].view(dtype)


def _device_bytes(region: CudaRegion) -> torch.Tensor:
    values = torch.as_tensor(_CudaArray(region), device=torch.device("cuda", region.device_index))
    if values.data_ptr() != region.address:
        raise InternalError("torch copied a region in device memory, where it should have made a view of it")
    return values


class _CudaArray:
    """Device memory as torch takes it in without a copy. Bytes, because the interface has no name for bfloat16.

    Source: CUDA Array Interface, version 3 (Numba's documentation).
    """

    def __init__(self, region: CudaRegion) -> None:
        is_read_only = False
        self.__cuda_array_interface__ = {
            "shape": (region.num_bytes,),
            "typestr": "|u1",
            "data": (region.address, is_read_only),
            "version": 3,
        }
