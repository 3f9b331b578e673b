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
from pdserve.engine.region import Region
from pdserve.engine.runner import Lead, Runner
from pdserve.engine.shape import cuda_device_of
from pdserve.engine.torch_executor import TorchExecutor
from pdserve.errors import ConfigError
from pdserve.kv.layout import KvLayout
from pdserve.model.config import ModelConfig
from pdserve.model.decoder import Decoder
from pdserve.model.weights import load_decoder

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedRank:
    runner: Runner
    regions: tuple[Region, ...]
    """KV; on rank 0 also tail and counter."""


def load_rank(config: ModelConfig, layout: KvLayout, start: RankStart) -> LoadedRank:
    """Requires: `layout` is that of one rank."""
    started = time.monotonic()
    spec = start.spec
    torch.set_num_threads(spec.num_threads)
    cuda_device = cuda_device_of(spec, rank=start.rank)
    device = _device(cuda_device)
    communicator = join_ranks(
        rank=start.rank,
        num_ranks=spec.tensor_parallel_size,
        rendezvous_fd=start.rendezvous_fd,
        backend="gloo" if cuda_device is None else "nccl",
    )
    decoder = load_decoder(
        Path(spec.model_dir),
        config,
        dtype=TORCH_DTYPES[spec.dtype],
        device=device,
        communicator=communicator,
    )
    storage = KvStorage.create(layout=layout, num_pages=spec.num_pages, cuda_device=cuda_device)
    executor = _executor_for(decoder, storage, spec)
    regions: tuple[Region, ...] = (storage.region,)
    lead = None
    if start.rank == 0:
        lead_storage = LeadStorage.create(
            num_tail_slots=spec.num_tail_slots, hidden_dim=config.hidden_dim, dtype=spec.dtype
        )
        lead = Lead(lead_storage, vocab_size=config.vocab_size, device=device)
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


def _device(cuda_device: int | None) -> torch.device:
    """Where the rank computes. Raises: `ConfigError` when this torch knows no CUDA."""
    if cuda_device is None:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(f"torch {torch.__version__} can't use CUDA here: install a build for this driver's CUDA")
    torch.cuda.set_device(cuda_device)
    return torch.device("cuda", cuda_device)


def _executor_for(decoder: Decoder, storage: KvStorage, spec: EngineSpec) -> Executor:
    if CpuExecutor.fits(decoder):
        return CpuExecutor(decoder, storage, num_threads=spec.num_threads)
    return TorchExecutor(decoder, storage)
