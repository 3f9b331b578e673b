"""Everything a rank builds once: storage, weights, executor, runner."""

import logging
import time
from pathlib import Path

import torch

from pdserve.engine.cpu_executor import CpuExecutor
from pdserve.engine.executor import Executor
from pdserve.engine.kv_storage import TORCH_DTYPES, KvStorage
from pdserve.engine.port import EngineSpec
from pdserve.engine.runner import Runner
from pdserve.engine.torch_executor import TorchExecutor
from pdserve.kv.layout import KvLayout
from pdserve.model.config import ModelConfig
from pdserve.model.weights import load_decoder

_log = logging.getLogger(__name__)


def load_runner(model_dir: Path, config: ModelConfig, layout: KvLayout, spec: EngineSpec) -> tuple[Runner, KvStorage]:
    torch.set_num_threads(spec.num_threads)
    started = time.monotonic()
    storage = KvStorage.create(
        layout=layout,
        num_pages=spec.num_pages,
        num_tail_slots=spec.num_tail_slots,
        hidden_dim=config.hidden_dim,
    )
    decoder = load_decoder(model_dir, config, dtype=TORCH_DTYPES[spec.dtype], device=torch.device("cpu"))
    executor: Executor
    if CpuExecutor.fits(decoder):
        executor = CpuExecutor(decoder, storage, num_threads=spec.num_threads)
    else:
        executor = TorchExecutor(decoder, storage)
    _log.info(
        "model_loaded dir=%s executor=%s seconds=%.1f", model_dir, type(executor).__name__, time.monotonic() - started
    )
    return Runner(config=config, storage=storage, executor=executor), storage
