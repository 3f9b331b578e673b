"""Engines with real rank processes on tiny checkpoints, and what tests ask of them."""

import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray

from pdserve.engine.client import RankEngine, start_engine
from pdserve.engine.port import EngineSpec
from pdserve.ids import SequenceId
from pdserve.sampling import SamplingParams
from pdserve.schedule.batch import Batch, Chunk, NewSequence
from pdserve.shared_region import host_buffer

DEADLINE_S = 60.0
NUM_PAGES = 32
PAGE_SLOTS = 16


def spec_of(model_dir: Path, *, dtype: str = "float32", tensor_parallel_size: int = 1) -> EngineSpec:
    return EngineSpec(
        model_dir=str(model_dir),
        num_pages=NUM_PAGES,
        page_slots=PAGE_SLOTS,
        num_tail_slots=3,
        num_threads=1,
        dtype=dtype,
        tensor_parallel_size=tensor_parallel_size,
    )


@asynccontextmanager
async def running(
    model_dir: Path, *, dtype: str = "float32", tensor_parallel_size: int = 1
) -> AsyncGenerator[RankEngine]:
    engine = await start_engine(spec_of(model_dir, dtype=dtype, tensor_parallel_size=tensor_parallel_size))
    try:
        yield engine
    finally:
        await engine.close()


def write_nine_heads(model_dir: Path, *, num_layers: int) -> None:
    """A seeded Llama with the heads of SmolLM2: 9, and 3 KV heads. Five blocks of feed-forward columns: with 9 ranks
    some have none."""
    torch.manual_seed(9)  # pyright: ignore[reportUnknownMemberType]
    config = transformers.LlamaConfig(
        vocab_size=131,
        hidden_size=144,
        intermediate_size=80,
        num_hidden_layers=num_layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=16,
        max_position_embeddings=256,
        initializer_range=0.3,
        tie_word_embeddings=True,
    )
    reference: Any = transformers.LlamaForCausalLM(config)
    reference.float().save_pretrained(model_dir)


def chunk_of(
    token_ids: Sequence[int],
    start: int,
    stop: int,
    *,
    pages: tuple[int, ...],
    sequence_id: int = 0,
    samples: bool = False,
    tail_slot: int | None = None,
) -> Chunk:
    return Chunk(
        sequence_id=SequenceId(sequence_id),
        start=start,
        token_ids=tuple(token_ids[start:stop]),
        page_indices=pages,
        samples=samples,
        tail_slot=tail_slot,
    )


def new_sequence(sequence_id: int, prompt: Sequence[int], *, temperature: float = 0.0) -> NewSequence:
    return NewSequence(
        sequence_id=SequenceId(sequence_id),
        prompt_token_ids=tuple(prompt),
        output_token_ids=(),
        sampling=SamplingParams(max_tokens=20, temperature=temperature, seed=5),
    )


def long_batch(pass_index: int) -> Batch:
    """A pass of some tens of milliseconds over pages [0, 13)."""
    token_ids = [7 * index % 131 for index in range(200)]
    return Batch(pass_index=pass_index, chunks=(chunk_of(token_ids, 0, 200, pages=tuple(range(13))),))


async def generate(engine: RankEngine, prompt: Sequence[int], *, pages: tuple[int, ...], num_tokens: int) -> list[int]:
    """Tokens of a new engine, which prefills in two chunks, the second beside another sequence. The first is drawn."""
    other = list(range(20, 33))
    half = len(prompt) // 2
    await engine.run(Batch(pass_index=0, chunks=(chunk_of(prompt, 0, half, pages=pages),)))
    chunks = (
        chunk_of(other, 0, len(other), pages=(30,), sequence_id=1),
        chunk_of(prompt, half, len(prompt), pages=pages, samples=True, tail_slot=1),
    )
    news = (new_sequence(0, prompt, temperature=1.5), new_sequence(1, prompt))
    result = await engine.run(Batch(pass_index=1, chunks=chunks, new_sequences=news))
    sequence = [*prompt, *result.sampled[0][1]]
    for pass_index in range(2, num_tokens + 1):
        chunk = chunk_of(sequence, len(sequence) - 1, len(sequence), pages=pages, sequence_id=1, samples=True)
        result = await engine.run(Batch(pass_index=pass_index, chunks=(chunk,)))
        sequence += result.sampled[0][1]
    return sequence[len(prompt) :]


def ticks(engine: RankEngine) -> int:
    return int.from_bytes(engine.counter_region.buffer[:8], sys.byteorder)


def kv_of_rank(engine: RankEngine, rank: int) -> NDArray[np.uint8]:
    """A copy of the KV of one rank: bytes [layer][page][head][...]."""
    layout, num_pages = engine.info.sharding.rank_layout, engine.info.num_pages
    kv = np.frombuffer(host_buffer(engine.kv_regions[rank])[: layout.region_bytes(num_pages)], np.uint8)
    return kv.reshape(layout.num_layers, num_pages, layout.num_kv_heads, layout.head_bytes)


def whole_kv(engine: RankEngine) -> NDArray[np.uint8]:
    """The KV of all heads, put together from the first rank of each replica set; the others must have the same."""
    sharding = engine.info.sharding
    parts: list[NDArray[np.uint8]] = []
    for set_index in range(sharding.num_replica_sets):
        first, *others = (kv_of_rank(engine, rank) for rank in sharding.ranks_of_set(set_index))
        assert all(np.array_equal(first, other) for other in others)
        parts.append(first)
    return np.concatenate(parts, axis=2)


def open_files(pid: int) -> list[str]:
    names: list[str] = []
    for path in Path(f"/proc/{pid}/fd").iterdir():
        # A process that loads modules closes files while we look.
        with suppress(FileNotFoundError):
            names.append(str(path.readlink()))
    return names


def listening_addresses(pids: Sequence[int]) -> list[str]:
    """Hexadecimal, as of /proc/net/tcp: `sl local_address rem_address st ... inode`; state 0A listens."""
    sockets = {name for pid in pids for name in open_files(pid)}
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return [row[1].partition(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in sockets]
