"""Several rank processes: the same bytes and tokens as with one, and what the layer counter of rank 0 promises."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
from numpy.typing import NDArray
from tests.process.engine_under_test import (
    DEADLINE_S,
    NUM_PAGES,
    chunk_of,
    generate,
    kv_of_rank,
    listening_addresses,
    long_batch,
    running,
    spec_of,
    ticks,
    whole_kv,
    write_nine_heads,
)
from tests.pure.tiny_checkpoints import write_checkpoint

from pdserve.engine.client import RankEngine, start_engine
from pdserve.errors import ConfigError
from pdserve.layer_counter import ticks_per_pass
from pdserve.schedule.batch import Batch, BatchResult
from pdserve.shared_region import host_buffer

NUM_RANKS = 3
NUM_LAYERS = 8
PROMPT = [11 * index % 131 for index in range(41)]
PAGES = (4, 9, 2)


@pytest.fixture(scope="module")
def nine_heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model_dir = tmp_path_factory.mktemp("nine-heads")
    write_nine_heads(model_dir, num_layers=NUM_LAYERS)
    return model_dir


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def three_ranks(nine_heads: Path) -> AsyncGenerator[RankEngine]:
    async with running(nine_heads, tensor_parallel_size=NUM_RANKS) as engine:
        yield engine


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    token_ids: list[int]
    kv: NDArray[np.uint8]
    tails: bytes


async def outcome(
    model_dir: Path, *, tensor_parallel_size: int, prompt: Sequence[int], num_tokens: int, dtype: str = "float32"
) -> Outcome:
    async with running(model_dir, dtype=dtype, tensor_parallel_size=tensor_parallel_size) as engine:
        assert len(set(engine.info.pids)) == len(engine.kv_regions) == tensor_parallel_size
        token_ids = await generate(engine, prompt, pages=PAGES, num_tokens=num_tokens)
        return Outcome(token_ids=token_ids, kv=whole_kv(engine), tails=engine.tail_region.buffer[:])


def assert_equal(one: Outcome, other: Outcome) -> None:
    assert one.token_ids == other.token_ids
    assert one.tails == other.tails
    assert np.array_equal(one.kv, other.kv)
    assert one.kv[:, PAGES].any(axis=-1).all()


async def test_kv_tails_and_tokens_of_9_ranks_equal_those_of_one(nine_heads: Path) -> None:
    """Replica sets of three. `test_serve_sharded` compares three ranks with one, on SmolLM2."""
    expected, cut = [
        await outcome(nine_heads, tensor_parallel_size=num_ranks, prompt=PROMPT, num_tokens=6) for num_ranks in (1, 9)
    ]
    assert_equal(cut, expected)


@pytest.mark.parametrize("name", ["deepseek-v3", "qwen3-moe"])
async def test_kv_tails_and_tokens_of_mixtures_on_2_ranks_equal_those_on_one(name: str, tmp_path: Path) -> None:
    """Latent attention, where both ranks hold the whole cache, and experts."""
    write_checkpoint(name, tmp_path)
    expected, cut = [
        await outcome(tmp_path, tensor_parallel_size=num_ranks, prompt=PROMPT, num_tokens=6) for num_ranks in (1, 2)
    ]
    assert_equal(cut, expected)


async def test_bfloat16_runs_on_several_ranks(nine_heads: Path) -> None:
    """Torch's own products and gathers of other types. Bits may differ: torch sums as the shape suggests."""
    cut = await outcome(nine_heads, tensor_parallel_size=3, prompt=PROMPT, num_tokens=2, dtype="bfloat16")
    assert cut.kv[:, PAGES].any(axis=-1).all()


@pytest.mark.asyncio(loop_scope="module")
async def test_regions_have_spare_bytes_and_the_layout_of_a_rank(three_ranks: RankEngine) -> None:
    sharding = three_ranks.info.sharding
    assert (sharding.layout.num_kv_heads, sharding.rank_layout.num_kv_heads, sharding.num_ranks) == (3, 1, NUM_RANKS)
    for region in three_ranks.kv_regions:
        assert region.num_bytes >= sharding.rank_layout.region_bytes(NUM_PAGES) + 64


@pytest.mark.asyncio(loop_scope="module")
async def test_ranks_listen_on_the_loopback_only(three_ranks: RankEngine) -> None:
    assert set(listening_addresses(three_ranks.info.pids)) == {"0100007F"}


def written_layers(kv: NDArray[np.uint8], complete: NDArray[np.uint8]) -> int:
    """How many of the first layers are all there."""
    return next((layer for layer in range(len(kv)) if not np.array_equal(kv[layer], complete[layer])), len(kv))


async def wait_for_tick(engine: RankEngine, tick: int) -> None:
    """Looks as often as it can: memory raises no event here, and the time between tick and look weakens the test."""
    while ticks(engine) < tick:  # noqa: ASYNC110
        await asyncio.sleep(0)


async def settled_ticks(engine: RankEngine) -> int:
    """The counter once it has stood still for long enough that a rank which could go on would have."""
    loop = asyncio.get_running_loop()
    seen, since = ticks(engine), loop.time()
    while loop.time() - since < 0.3:
        await asyncio.sleep(0.01)
        if ticks(engine) != seen:
            seen, since = ticks(engine), loop.time()
    return seen


async def start_pass(engine: RankEngine) -> tuple[asyncio.Task[BatchResult], int]:
    """A long pass over pages that hold nothing, and the number of ticks before it."""
    for region in engine.kv_regions:
        host_buffer(region)[:] = bytes(region.num_bytes)
    first_tick = ticks(engine)
    return asyncio.create_task(engine.run(long_batch(first_tick // ticks_per_pass(NUM_LAYERS)))), first_tick


async def complete_kv(engine: RankEngine) -> list[NDArray[np.uint8]]:
    """By rank, what every later pass of `start_pass` comes to."""
    started, _ = await start_pass(engine)
    await asyncio.wait_for(started, DEADLINE_S)
    return [kv_of_rank(engine, rank) for rank in range(NUM_RANKS)]


@pytest.mark.asyncio(loop_scope="module")
async def test_kv_of_all_ranks_is_in_place_whenever_rank_0_ticks(three_ranks: RankEngine) -> None:
    complete = await complete_kv(three_ranks)
    missing: list[str] = []
    for _ in range(5):
        started, first_tick = await start_pass(three_ranks)
        for layer in range(NUM_LAYERS):
            await wait_for_tick(three_ranks, first_tick + layer + 1)
            for rank in range(NUM_RANKS):
                if written_layers(kv_of_rank(three_ranks, rank), complete[rank]) <= layer:
                    missing.append(f"layer {layer} of rank {rank}")
        await asyncio.wait_for(started, DEADLINE_S)
    assert missing == []


@pytest.mark.parametrize("slow_rank", range(1, NUM_RANKS))
@pytest.mark.asyncio(loop_scope="module")
async def test_counter_waits_for_the_kv_of_a_rank_that_stands_still(slow_rank: int, three_ranks: RankEngine) -> None:
    complete = (await complete_kv(three_ranks))[slow_rank]
    num_caught = 0
    for stop_after in range(NUM_LAYERS - 1):
        started, first_tick = await start_pass(three_ranks)
        await wait_for_tick(three_ranks, first_tick + stop_after)
        os.kill(three_ranks.info.pids[slow_rank], signal.SIGSTOP)
        try:
            # The last tick of a pass says that it ends.
            num_layers = min(await settled_ticks(three_ranks) - first_tick, NUM_LAYERS)
            num_written = written_layers(kv_of_rank(three_ranks, slow_rank), complete)
        finally:
            os.kill(three_ranks.info.pids[slow_rank], signal.SIGCONT)
        await asyncio.wait_for(started, DEADLINE_S)
        assert num_layers <= num_written
        num_caught += num_layers < NUM_LAYERS
    assert num_caught > 0


@pytest.mark.parametrize(
    ("num_ranks", "message"),
    [
        (2, "tensor parallel size 2 neither divides 3 KV heads nor is a multiple"),
        (6, "tensor parallel size 6 does not divide the model's 9 attention heads"),
        (0, "tensor parallel size 0 neither divides 3 KV heads"),
    ],
)
async def test_ranks_that_do_not_divide_the_heads_are_refused(num_ranks: int, message: str, nine_heads: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        await start_engine(spec_of(nine_heads, tensor_parallel_size=num_ranks))


def test_refusal_comes_before_torch_is_loaded(nine_heads: Path) -> None:
    script = (
        "import asyncio, sys\n"
        "from pdserve.engine.client import start_engine\n"
        "from pdserve.engine.port import EngineSpec\n"
        "from pdserve.errors import ConfigError\n"
        f"spec = EngineSpec(model_dir={str(nine_heads)!r}, num_pages=4, page_slots=16, num_tail_slots=1,\n"
        "    num_threads=1, tensor_parallel_size=2)\n"
        "try:\n"
        "    asyncio.run(start_engine(spec))\n"
        "except ConfigError:\n"
        "    print('torch' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=DEADLINE_S
    )
    assert done.stdout == "False\n"


async def test_weights_that_lack_a_tensor_are_refused_by_all_ranks(nine_heads: Path, tmp_path: Path) -> None:
    """Each rank says so; the operator reads it once."""
    (tmp_path / "config.json").write_text(
        (nine_heads / "config.json").read_text().replace('"num_hidden_layers": 8', '"num_hidden_layers": 9')
    )
    (tmp_path / "model.safetensors").symlink_to(nine_heads / "model.safetensors")
    with pytest.raises(ConfigError, match=r"the weights have no tensor model\.layers\.8"):
        await start_engine(spec_of(tmp_path, tensor_parallel_size=3))


async def test_batch_that_one_rank_alone_refuses_ends_the_others_too(nine_heads: Path) -> None:
    """Rank 0 keeps the sampler: the others learn of it by the loss of their peer, and are not blamed."""
    async with running(nine_heads, tensor_parallel_size=3) as engine:
        batch = Batch(pass_index=0, chunks=(chunk_of([1], 0, 1, pages=(0,), samples=True),))
        with pytest.raises(Exception, match=r"rank 0 \(process \d+\) failed: .*was not announced"):
            await engine.run(batch)
