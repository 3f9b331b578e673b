"""Everything a rank builds once: connections to the other ranks, storage, weights, executor, runner."""

import logging
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from pdserve.engine.communicator import join_ranks
from pdserve.engine.cpu_executor import CpuExecutor
from pdserve.engine.executor import Executor
from pdserve.engine.kv_storage import TORCH_DTYPES, KvStorage, LeadStorage
from pdserve.engine.port import EngineSpec
from pdserve.engine.rank_protocol import RankStart
from pdserve.engine.runner import Lead, Runner
from pdserve.engine.torch_executor import TorchExecutor
from pdserve.kv.layout import KvLayout
from pdserve.model.config import ModelConfig
from pdserve.model.decoder import Decoder
from pdserve.model.weights import load_decoder
from pdserve.shared_region import SharedRegion

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedRank:
    runner: Runner
    regions: tuple[SharedRegion, ...]
    """KV; on rank 0 also tail and counter."""


def load_rank(config: ModelConfig, layout: KvLayout, start: RankStart) -> LoadedRank:
    """Requires: `layout` is that of one rank."""
    started = time.monotonic()
    spec = start.spec
    torch.set_num_threads(spec.num_threads)
    communicator = join_ranks(
        rank=start.rank,
        num_ranks=spec.tensor_parallel_size,
        rendezvous_fd=start.rendezvous_fd,
        backend="gloo",
    )
    decoder = load_decoder(
        Path(spec.model_dir),
        config,
        dtype=TORCH_DTYPES[spec.dtype],
        device=torch.device("cpu"),
        communicator=communicator,
    )
    storage = KvStorage.create(layout=layout, num_pages=spec.num_pages)
    executor = _executor_for(decoder, storage, spec)
    regions = (storage.region,)
    lead = None
    if start.rank == 0:
        lead_storage = LeadStorage.create(
            num_tail_slots=spec.num_tail_slots, hidden_dim=config.hidden_dim, dtype=spec.dtype
        )
        lead = Lead(lead_storage, vocab_size=config.vocab_size)
        regions += (lead_storage.tail_region, lead_storage.counter_region)
    _log.info(
        "model_loaded dir=%s rank=%d executor=%s seconds=%.1f",
        spec.model_dir,
        start.rank,
        type(executor).__name__,
        time.monotonic() - started,
    )
    return LoadedRank(
        runner=Runner(config=config, storage=storage, executor=executor, lead=lead),
        regions=regions,
    )


def _executor_for(decoder: Decoder, storage: KvStorage, spec: EngineSpec) -> Executor:
    if CpuExecutor.fits(decoder):
        return CpuExecutor(decoder, storage, num_threads=spec.num_threads)
    return TorchExecutor(decoder, storage)
