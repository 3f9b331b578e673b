"""Everything a rank builds once: connections to the other ranks, storage, weights, executor, runner."""

import logging
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from pdserve.engine.communicator import join_ranks
from pdserve.engine.draft_loading import load_drafter
from pdserve.engine.draft_shape import draft_shape_of
from pdserve.engine.executor_loading import load_executor
from pdserve.engine.grammar import Grammars
from pdserve.engine.kv_storage import KvStorage, LeadStorage
from pdserve.engine.lead import Lead
from pdserve.engine.port import EngineSpec
from pdserve.engine.rank_protocol import RankStart
from pdserve.engine.rank_regions import LeadRegions, RankRegions
from pdserve.engine.runner import Runner
from pdserve.engine.sampler import Sampler
from pdserve.engine.shape import cuda_device_of
from pdserve.errors import ConfigError
from pdserve.kv.layout import KvLayout
from pdserve.model.config import ModelConfig

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedRank:
    runner: Runner
    regions: RankRegions


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
    storage = KvStorage.create(layout=layout, num_pages=spec.num_pages, cuda_device=cuda_device)
    executor = load_executor(
        Path(spec.model_dir), config, storage, communicator=communicator, num_threads=spec.num_threads
    )
    lead, lead_regions = _load_lead(config, spec, device) if start.rank == 0 else (None, None)
    _log.info(
        "model_loaded dir=%s rank=%d executor=%s seconds=%.1f",
        spec.model_dir,
        start.rank,
        type(executor).__name__,
        time.monotonic() - started,
    )
    return LoadedRank(
        runner=Runner(config=config, storage=storage, executor=executor, lead=lead),
        regions=RankRegions(kv=storage.region, lead=lead_regions),
    )


def _load_lead(config: ModelConfig, spec: EngineSpec, device: torch.device) -> tuple[Lead, LeadRegions]:
    """What rank 0 has beside its part of the model, the drafter among it."""
    storage = LeadStorage.create(num_tail_slots=spec.num_tail_slots, hidden_dim=config.hidden_dim, dtype=spec.dtype)
    shape = draft_shape_of(config, spec)
    draft = None if shape is None else load_drafter(shape, config, spec, cuda_device=cuda_device_of(spec, rank=0))
    lead = Lead(
        storage,
        sampler=Sampler(
            vocab_size=config.vocab_size,
            grammars=Grammars(Path(spec.model_dir), vocab_size=config.vocab_size),
        ),
        device=device,
        drafter=None if draft is None else draft.drafter,
    )
    regions = LeadRegions(
        tail=storage.tail_region,
        counter=storage.counter_region,
        draft_kv=None if draft is None else draft.region,
    )
    return lead, regions


def _device(cuda_device: int | None) -> torch.device:
    """Where the rank computes. Raises: `ConfigError` when this torch knows no CUDA."""
    if cuda_device is None:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(f"torch {torch.__version__} can't use CUDA here: install a build for this driver's CUDA")
    torch.cuda.set_device(cuda_device)
    return torch.device("cuda", cuda_device)
