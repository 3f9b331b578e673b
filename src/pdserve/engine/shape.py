"""What a spec comes to for its model: worked out alike by the main process and by every rank. Torch-free."""

import hashlib
from pathlib import Path

from pdserve.engine.draft_shape import DraftShape, draft_shape_of
from pdserve.engine.port import EngineInfo, EngineSpec
from pdserve.errors import ConfigError
from pdserve.kv.layout import DTYPE_BYTES, KvLayout
from pdserve.kv.shard import KvSharding
from pdserve.model.checkpoint import fingerprint
from pdserve.model.config import ModelConfig, read_config
from pdserve.units import div_ceil

SPARE_BYTES = 64
"""Behind the last page and the last tail slot: the fabric's flush writes into a region's last 8 bytes."""
_TAIL_ALIGNMENT = 64


def sharding_of(config: ModelConfig, spec: EngineSpec) -> KvSharding:
    """Raises: `ConfigError` for an unknown dtype, or when the ranks do not divide the model's heads."""
    layout = config.kv_layout(page_slots=spec.page_slots, dtype=spec.dtype)
    require_ranks(config, spec.tensor_parallel_size)
    return KvSharding(layout=layout, num_ranks=spec.tensor_parallel_size)


def require_ranks(config: ModelConfig, num_ranks: int) -> None:
    """Raises: `ConfigError` when so many ranks can't share the model's heads."""
    KvSharding(layout=config.kv_layout(page_slots=1, dtype="float32"), num_ranks=num_ranks).require_valid()
    if config.num_heads % num_ranks:
        raise ConfigError(
            f"tensor parallel size {num_ranks} does not divide the model's {config.num_heads} attention heads"
        )


def tail_slot_bytes(*, hidden_dim: int, dtype: str) -> int:
    return div_ceil(hidden_dim * DTYPE_BYTES[dtype], _TAIL_ALIGNMENT) * _TAIL_ALIGNMENT


def kv_region_bytes(layout: KvLayout, *, num_pages: int) -> int:
    return layout.region_bytes(num_pages) + SPARE_BYTES


def cuda_device_of(spec: EngineSpec, *, rank: int) -> int | None:
    return spec.cuda_devices[rank] if spec.cuda_devices else None


def info_of(spec: EngineSpec) -> EngineInfo:
    """All that an engine says of itself, but for the processes, which are not there yet.

    Raises: `ConfigError` when the spec can't be done. Cost: reads a sample of the weights.
    """
    if spec.cuda_devices and len(spec.cuda_devices) != spec.tensor_parallel_size:
        raise ConfigError(f"{spec.tensor_parallel_size} ranks can't be spread over CUDA devices {spec.cuda_devices}")
    model_dir = Path(spec.model_dir)
    config = read_config(model_dir)
    draft = draft_shape_of(config, spec)
    return EngineInfo(
        sharding=sharding_of(config, spec),
        num_pages=spec.num_pages,
        num_tail_slots=spec.num_tail_slots,
        tail_slot_bytes=tail_slot_bytes(hidden_dim=config.hidden_dim, dtype=spec.dtype),
        max_model_len=config.max_model_len,
        vocab_size=config.vocab_size,
        draft_layout=None if draft is None else draft.layout,
        model_fingerprint=_with_drafter(fingerprint(model_dir, config), draft),
        pids=(),
    )


def _with_drafter(model_fingerprint: str, draft: DraftShape | None) -> str:
    """KV is exchangeable where the drafter's is too."""
    if draft is None:
        return model_fingerprint
    return hashlib.sha256(f"{model_fingerprint} {draft.fingerprint}".encode()).hexdigest()[: len(model_fingerprint)]
