"""The engine as a worker sees it: a model on one or more rank processes, one forward pass at a time. Torch-free."""

from typing import Protocol

import msgspec

from pdserve.kv.layout import KvLayout
from pdserve.schedule.batch import Batch, BatchResult
from pdserve.shared_region import SharedRegion


class EngineSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an engine process is started with."""

    model_dir: str
    num_pages: int
    page_slots: int
    num_tail_slots: int
    num_threads: int
    cpus: tuple[int, ...] = ()
    """Cores to pin the rank to; empty: not pinned."""
    dtype: str = "float32"


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a started engine says of itself."""

    layout: KvLayout
    num_pages: int
    num_tail_slots: int
    tail_slot_bytes: int
    """Bytes of one tail: the hidden state, in the model's dtype, rounded up to 64."""
    max_model_len: int
    model_fingerprint: str
    """Hash of the config and the weights' identity: equal exactly when KV is exchangeable."""
    pid: int


class Engine(Protocol):
    """Lifetime: regions live until `close`."""

    info: EngineInfo
    kv_region: SharedRegion
    """`info.layout.region_bytes(info.num_pages)` bytes or more."""
    tail_region: SharedRegion
    """`num_tail_slots * tail_slot_bytes` bytes or more."""
    counter_region: SharedRegion

    async def run(self, batch: Batch) -> BatchResult:
        """One pass. Requires: no other pass is running. Raises: `InternalError` when the rank died or failed."""
        ...

    async def close(self) -> None: ...
