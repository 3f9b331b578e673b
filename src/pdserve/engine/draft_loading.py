"""The drafter of rank 0, loaded, with a cache of its own."""

from dataclasses import dataclass
from pathlib import Path
from typing import assert_never

import torch

from pdserve.config.speculation import Drafter as Kind
from pdserve.engine.draft_head import DraftHead
from pdserve.engine.draft_model import DraftModel
from pdserve.engine.draft_shape import DraftShape
from pdserve.engine.drafter import Drafter
from pdserve.engine.executor_loading import load_executor
from pdserve.engine.kernel_products import fit_kernels, with_kernels
from pdserve.engine.kv_storage import TORCH_DTYPES, KvStorage
from pdserve.engine.port import EngineSpec
from pdserve.engine.region import Region
from pdserve.errors import InternalError
from pdserve.model.config import ModelConfig
from pdserve.model.draft_head import DraftHeadModule
from pdserve.model.eagle import load_eagle
from pdserve.model.mtp import load_mtp
from pdserve.model.parallel import SingleRank


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedDrafter:
    drafter: Drafter
    region: Region
    """Its KV."""


def load_drafter(shape: DraftShape, config: ModelConfig, spec: EngineSpec, *, cuda_device: int | None) -> LoadedDrafter:
    """`config` is the model's.

    Raises: `ConfigError` when the weights are not what the config says, or the device has not so much memory.
    """
    storage = KvStorage.create(
        name="pdserve-draft-kv", layout=shape.layout, num_pages=spec.num_pages, cuda_device=cuda_device
    )
    drafter: Drafter
    if shape.kind is Kind.DRAFT_MODEL:
        executor = load_executor(
            shape.weights_dir, shape.config, storage, communicator=SingleRank(), num_threads=spec.num_threads
        )
        drafter = DraftModel(
            executor, storage, max_model_len=shape.max_model_len, num_draft_tokens=shape.num_draft_tokens
        )
    else:
        drafter = DraftHead(
            _load_head(shape, config, spec, device=storage.pages_LPHKSD.device),
            storage,
            max_model_len=shape.max_model_len,
            num_draft_tokens=shape.num_draft_tokens,
        )
    return LoadedDrafter(drafter=drafter, region=storage.region)


def _load_head(shape: DraftShape, config: ModelConfig, spec: EngineSpec, *, device: torch.device) -> DraftHeadModule:
    dtype = TORCH_DTYPES[spec.dtype]
    match shape.kind:
        case Kind.MTP:
            head = load_mtp(Path(spec.model_dir), config, dtype=dtype, device=device)
        case Kind.EAGLE:
            head = load_eagle(shape.weights_dir, Path(spec.model_dir), config, dtype=dtype, device=device)
        case Kind.DRAFT_MODEL | Kind.NGRAM:
            raise InternalError(f"a {shape.kind.value} drafter is no head")
        case _:
            assert_never(shape.kind)
    return with_kernels(head, num_threads=spec.num_threads) if fit_kernels(head) else head
