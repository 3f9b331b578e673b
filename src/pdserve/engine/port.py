"""The engine as a worker sees it: a model on one or more rank processes, one forward pass at a time. Torch-free."""

from typing import NoReturn, Protocol

import msgspec

from pdserve.config.speculation import Speculation
from pdserve.kv.layout import KvLayout
from pdserve.kv.shard import KvSharding
from pdserve.schedule.batch import Batch, BatchResult
from pdserve.shared_region import MemoryRegion, SharedRegion


class EngineSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an engine is started with. Page and slot counts are of each rank, and equal on all."""

    model_dir: str
    num_pages: int
    page_slots: int
    num_tail_slots: int
    num_threads: int
    """Of each rank."""
    cpus: tuple[int, ...] = ()
    """Cores that the ranks share out among them; empty: not pinned."""
    cuda_devices: tuple[int, ...] = ()
    """By rank, as CUDA numbers them in this process; empty: the ranks compute on cores."""
    dtype: str = "float32"
    tensor_parallel_size: int = 1
    speculation: Speculation | None = None
    """With a drafter that is a model (`needs_engine`); it runs whole on rank 0, whatever the number of ranks."""


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a started engine says of itself."""

    sharding: KvSharding
    num_pages: int
    num_tail_slots: int
    tail_slot_bytes: int
    """Bytes of one tail: the hidden state, in the model's dtype, rounded up to 64."""
    max_model_len: int
    vocab_size: int
    """Token ids are below it: the model's own, which may be more than the tokenizer has."""
    draft_layout: KvLayout | None = None
    """Of the drafter's cache, whole, on rank 0, where there is one: as many pages, of as many slots."""
    model_fingerprint: str
    """Hash of the config and the weights' identity, the drafter's too: equal exactly when KV is exchangeable."""
    pids: tuple[int, ...]
    """Of the rank processes, by rank."""

    @property
    def num_counted_layers(self) -> int:
        """Layers that tick in each pass: the model's, then the drafter's."""
        num_draft_layers = self.draft_layout.num_layers if self.draft_layout is not None else 0
        return self.sharding.layout.num_layers + num_draft_layers


class Engine(Protocol):
    """Lifetime: regions live until `close`."""

    info: EngineInfo
    tail_region: SharedRegion
    """Of rank 0: `num_tail_slots * tail_slot_bytes` bytes, and 64 spare bytes."""
    counter_region: SharedRegion
    """Of rank 0: when it has ticked layer L, the KV of layer L is in the regions of all ranks. The drafter's layers
    tick after the model's."""

    @property
    def kv_regions(self) -> tuple[MemoryRegion, ...]:
        """By rank; `info.sharding.rank_layout.region_bytes(info.num_pages)` bytes each, and 64 spare bytes."""
        ...

    @property
    def draft_kv_region(self) -> MemoryRegion | None:
        """Of rank 0: the drafter's cache, `info.draft_layout.region_bytes(info.num_pages)` bytes and 64 spare ones."""
        ...

    async def run(self, batch: Batch) -> BatchResult:
        """One pass on all ranks. Requires: no other pass is running.

        Raises: `InternalError` that names the rank, when one died or failed; the others are ended then.
        """
        ...

    async def wait_failed(self) -> NoReturn:
        """Raises: `InternalError` that names the rank as soon as one has died or failed, between passes too."""
        ...

    async def close(self) -> None: ...
