"""The worker's end of an engine: starts the rank processes and runs passes on them. Torch-free."""

import asyncio
import os
from contextlib import ExitStack
from typing import NoReturn

import msgspec

from pdserve.config.cores import share_of_cpus
from pdserve.engine.cuda_driver import require_devices
from pdserve.engine.cuda_writes import NicWrites
from pdserve.engine.port import EngineInfo, EngineSpec
from pdserve.engine.rank_group import RankGroup
from pdserve.engine.rank_protocol import PassDone, RankReady, RankStart, RunPass, encode_frame
from pdserve.engine.shape import info_of, kv_region_bytes
from pdserve.errors import InternalError
from pdserve.schedule.batch import Batch, BatchResult

_START_TIMEOUT_S = 600.0
"""A 70B model read from a slow disk takes minutes."""
_PASS_TIMEOUT_S = 300.0
"""A pass over 8,192 tokens takes 40 s on a slow core; what needs longer than this hangs."""


async def start_engine(spec: EngineSpec) -> "RankEngine":
    """An engine whose ranks have loaded the model.

    Raises: `ConfigError` when the spec can't be done, `InternalError` that names the rank which died while starting.
    Cost: seconds; the model is read from disk.
    """
    info = await asyncio.to_thread(info_of, spec)
    if spec.cuda_devices:
        await asyncio.to_thread(require_devices, spec.cuda_devices)
    with ExitStack() as undo:
        nic_writes = await asyncio.to_thread(NicWrites, spec.cuda_devices)
        undo.callback(nic_writes.close)
        engine = await _start_ranks(spec, info, nic_writes)
        undo.pop_all()
    return engine


async def _start_ranks(spec: EngineSpec, info: EngineInfo, nic_writes: NicWrites) -> "RankEngine":
    """Raises: as `start_engine`; then no rank is left."""
    num_ranks = spec.tensor_parallel_size
    kv_bytes = kv_region_bytes(info.sharding.rank_layout, num_pages=spec.num_pages)
    draft_kv_bytes = kv_region_bytes(info.draft_layout, num_pages=spec.num_pages) if info.draft_layout else None
    # A file without a name: nothing of it is left, however the processes end.
    rendezvous_fd = os.memfd_create("pdserve-rendezvous") if num_ranks > 1 else None
    try:
        group = await RankGroup.spawn(
            spec, kv_bytes=kv_bytes, draft_kv_bytes=draft_kv_bytes, rendezvous_fd=rendezvous_fd
        )
    finally:
        if rendezvous_fd is not None:
            os.close(rendezvous_fd)
    starts = [
        RankStart(
            spec=spec,
            rank=rank,
            cpus=share_of_cpus(spec.cpus, index=rank, num_shares=num_ranks),
            rendezvous_fd=rendezvous_fd,
        )
        for rank in range(num_ranks)
    ]
    try:
        replies = await group.ask(
            [encode_frame(start) for start in starts], what=f"loading {spec.model_dir}", timeout_s=_START_TIMEOUT_S
        )
        if not all(isinstance(reply, RankReady) for reply in replies):
            raise InternalError("a rank process answered its start with a pass")
        pids = tuple(rank.pid for rank in group.ranks)
        return RankEngine(group, nic_writes, msgspec.structs.replace(info, pids=pids))
    except BaseException:
        await group.close()
        raise


class RankEngine:
    """Implements `pdserve.engine.port.Engine`. Once a pass has failed, every later one does."""

    def __init__(self, group: RankGroup, nic_writes: NicWrites, info: EngineInfo) -> None:
        self.info = info
        regions = [rank.regions for rank in group.ranks if rank.regions is not None]
        lead = regions[0].lead if regions else None
        if len(regions) != len(group.ranks) or lead is None:
            raise InternalError("a rank process was ready without its regions")
        self.kv_regions = tuple(each.kv for each in regions)
        self.tail_region, self.counter_region, self.draft_kv_region = lead.tail, lead.counter, lead.draft_kv
        self._group = group
        self._nic_writes = nic_writes
        self._is_running = False

    async def run(self, batch: Batch) -> BatchResult:
        """Raises: `InternalError` when a rank died or failed, or while another pass is running."""
        if self._is_running:
            raise InternalError(f"pass {batch.pass_index} came while another pass was running")
        self._is_running = True
        try:
            # A sequence that is in its first batch here may have landed a moment ago.
            self._nic_writes.make_visible()
            what = f"pass {batch.pass_index}"
            frame = encode_frame(RunPass(batch=batch))
            replies = await self._group.ask([frame] * len(self.kv_regions), what=what, timeout_s=_PASS_TIMEOUT_S)
        finally:
            self._is_running = False
        match replies[0]:
            case PassDone(result=result):
                return result
            case reply:
                raise InternalError(f"rank 0 answered pass {batch.pass_index} with {type(reply).__name__}")

    async def wait_failed(self) -> NoReturn:
        """Raises: `InternalError` as soon as a rank has died or failed, between passes too."""
        raise await self._group.wait_failed()

    async def close(self) -> None:
        """Ends the ranks and unmaps the regions. Requires: no views of their buffers are left."""
        await self._group.close()
        self._nic_writes.close()
