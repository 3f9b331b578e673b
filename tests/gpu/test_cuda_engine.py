"""An engine on CUDA devices beside one on cores: the same tokens, and nearly the same KV and tails."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tests.gpu.device_bytes import read_bytes
from tests.process.engine_under_test import chunk_of, generate, running, spec_of, ticks, whole_kv
from tests.pure.tiny_checkpoints import NUM_LAYERS, write_checkpoint

from pdserve.engine.client import RankEngine, start_engine
from pdserve.engine.cuda_region import CudaRegion
from pdserve.layer_counter import ticks_per_pass
from pdserve.schedule.batch import Batch

PROMPT = list(range(30, 63))
PAGES = (3, 1, 7, 2)
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model_dir = tmp_path_factory.mktemp("qwen3")
    write_checkpoint("qwen3", model_dir)
    return model_dir


@asynccontextmanager
async def running_on(model_dir: Path, *cuda_devices: int) -> AsyncGenerator[RankEngine]:
    spec = spec_of(model_dir, tensor_parallel_size=len(cuda_devices))
    engine = await start_engine(msgspec.structs.replace(spec, cuda_devices=cuda_devices))
    try:
        yield engine
    finally:
        await engine.close()


def device_kv(engine: RankEngine) -> NDArray[np.float32]:
    """A copy of the KV of the only rank."""
    (region,) = engine.kv_regions
    assert isinstance(region, CudaRegion)
    num_bytes = engine.info.sharding.rank_layout.region_bytes(engine.info.num_pages)
    return np.frombuffer(read_bytes(region, start=0, num_bytes=num_bytes), np.float32)


def tails(engine: RankEngine) -> NDArray[np.float32]:
    num_bytes = engine.info.num_tail_slots * engine.info.tail_slot_bytes
    return np.frombuffer(engine.tail_region.buffer[:num_bytes], np.float32)


async def test_engine_on_cuda_gives_the_tokens_kv_and_tails_of_an_engine_on_cores(checkpoint: Path) -> None:
    async with running(checkpoint) as on_cores, running_on(checkpoint, 0) as on_cuda:
        expected = await generate(on_cores, PROMPT, pages=PAGES, num_tokens=8)
        assert await generate(on_cuda, PROMPT, pages=PAGES, num_tokens=8) == expected
        assert ticks(on_cuda) == ticks(on_cores)
        np.testing.assert_allclose(device_kv(on_cuda), whole_kv(on_cores).view(np.float32).ravel(), atol=TOLERANCE)
        np.testing.assert_allclose(tails(on_cuda), tails(on_cores), atol=TOLERANCE)


async def test_pass_on_cuda_has_put_its_kv_in_the_region_when_its_last_layer_has_ticked(checkpoint: Path) -> None:
    batch = Batch(pass_index=0, chunks=(chunk_of(PROMPT, 0, len(PROMPT), pages=PAGES),))
    async with running_on(checkpoint, 0) as engine:
        await engine.run(batch)
        assert ticks(engine) == ticks_per_pass(NUM_LAYERS)
        layout = engine.info.sharding.rank_layout
        by_page = device_kv(engine).reshape(NUM_LAYERS, engine.info.num_pages, -1)
        num_full_pages = len(PROMPT) // layout.page_slots
        assert (np.abs(by_page[:, PAGES[:num_full_pages]]).sum(axis=-1) > 0).all()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
async def test_two_ranks_on_two_devices_give_the_tokens_of_one(checkpoint: Path) -> None:
    async with running_on(checkpoint, 0) as one, running_on(checkpoint, 0, 1) as two:
        expected = await generate(one, PROMPT, pages=PAGES, num_tokens=8)
        assert await generate(two, PROMPT, pages=PAGES, num_tokens=8) == expected
