"""A rank process of its own: passes, regions, layer counter, and every way in which it can end."""

import asyncio
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from tests.process.engine_under_test import (
    DEADLINE_S,
    chunk_of,
    new_sequence,
    running,
    spec_of,
    ticks,
    whole_kv,
)
from tests.pure.tiny_checkpoints import NUM_LAYERS, VOCAB_SIZE, reference_logits, write_checkpoint

from pdserve import layer_counter
from pdserve.engine.client import start_engine
from pdserve.errors import ConfigError, InternalError
from pdserve.ids import SequenceId
from pdserve.sampling import SamplingParams
from pdserve.schedule.batch import Batch, NewSequence
from pdserve.shared_region import host_buffer


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model_dir = tmp_path_factory.mktemp("qwen3")
    write_checkpoint("qwen3", model_dir)
    return model_dir


async def test_mixed_batches_generate_the_greedy_tokens_of_transformers(checkpoint: Path, tmp_path: Path) -> None:
    reference = write_checkpoint("qwen3", tmp_path)
    prompts = [[1, 2, 3, 4, 5], list(range(40)), [7]]
    pages = [(4, 9), (1, 2, 3, 5), (0, 8)]
    sequences = [list(prompt) for prompt in prompts]
    async with running(checkpoint) as engine:
        computed = [0, 0, 0]
        # The long prompt is still prefilled when the others already decode.
        cuts = [[5, 6, 7, 8, 9], [16, 32, 40, 41, 42], [1, 2, 3, 4, 5]]
        for step in range(5):
            chunks = tuple(
                chunk_of(
                    sequences[index],
                    computed[index],
                    cuts[index][step],
                    pages=pages[index],
                    sequence_id=index,
                    samples=cuts[index][step] >= len(prompts[index]),
                )
                for index in range(3)
            )
            news = tuple(new_sequence(index, prompts[index]) for index in range(3)) if step == 0 else ()
            result = await engine.run(Batch(pass_index=step, chunks=chunks, new_sequences=news))
            computed = [cuts[index][step] for index in range(3)]
            assert [sequence_id for sequence_id, _ in result.sampled] == [
                chunk.sequence_id for chunk in chunks if chunk.samples
            ]
            for sequence_id, sampled in result.sampled:
                sequences[sequence_id] += sampled
    for prompt, sequence in zip(prompts, sequences, strict=True):
        expected = [int(token_id) for token_id in reference_logits(reference, sequence).argmax(dim=-1)]
        assert sequence[len(prompt) :] == expected[len(prompt) - 1 : -1]


@pytest.mark.parametrize("tensor_parallel_size", [1, 2])
async def test_logprobs_of_those_who_ask_are_the_model_s_own(tmp_path: Path, tensor_parallel_size: int) -> None:
    """Whatever bias and temperature do to the token. Those of the prompt too."""
    reference = write_checkpoint("qwen3", tmp_path)
    prompt = [5, 6, 7, 8]
    sampling = SamplingParams(
        max_tokens=9, temperature=1.7, seed=3, logit_bias=((11, 100.0),), num_top_logprobs=VOCAB_SIZE + 1
    )
    asking = NewSequence(
        sequence_id=SequenceId(1), prompt_token_ids=tuple(prompt), output_token_ids=(), sampling=sampling
    )
    chunks = [chunk_of(prompt, 0, 4, pages=(index,), sequence_id=index, samples=True) for index in (0, 1)]
    chunks[0] = replace(chunks[0], num_prompt_logprobs=0)
    async with running(tmp_path, tensor_parallel_size=tensor_parallel_size) as engine:
        news = (new_sequence(0, prompt), asking)
        result = await engine.run(Batch(pass_index=0, chunks=tuple(chunks), new_sequences=news))
    *expected_of_prompt, expected_V = reference_logits(reference, prompt).log_softmax(dim=-1)
    ((sequence_id, (logprobs,)),) = result.logprobs
    assert (sequence_id, logprobs.token_id) == (1, 11) and result.sampled[1] == (1, (11,))
    assert logprobs.logprob == pytest.approx(float(expected_V[11]), abs=1e-4)
    ((_, entries),) = result.prompt_logprobs
    assert [(entry.token_id, entry.logprob) for entry in entries] == [
        (token_id, pytest.approx(float(expected_V[token_id]), abs=1e-4))
        for token_id, expected_V in zip(prompt[1:], expected_of_prompt, strict=True)
    ]
    assert sorted(token_id for token_id, _ in logprobs.top) == list(range(VOCAB_SIZE))
    values = [logprob for _, logprob in logprobs.top]
    assert values == sorted(values, reverse=True)
    assert values == pytest.approx([float(expected_V[token_id]) for token_id, _ in logprobs.top], abs=1e-4)


async def test_pass_writes_tail_and_ticks_once_a_layer_and_at_its_end(checkpoint: Path) -> None:
    async with running(checkpoint) as engine:
        info = engine.info
        assert (info.num_tail_slots, info.tail_slot_bytes, info.max_model_len) == (3, 192, 256)
        assert engine.tail_region.num_bytes >= 3 * 192 + 64
        assert engine.counter_region.num_bytes >= layer_counter.REGION_BYTES
        token_ids = list(range(20))
        first = await engine.run(Batch(pass_index=0, chunks=(chunk_of(token_ids, 0, 16, pages=(2,)),)))
        assert ticks(engine) == layer_counter.first_tick(pass_index=1, num_layers=NUM_LAYERS)
        assert first.sampled == ()
        assert first.started_ns < first.ended_ns
        tail_chunk = chunk_of(token_ids, 16, 20, pages=(2, 6), tail_slot=1)
        await engine.run(Batch(pass_index=1, chunks=(tail_chunk,)))
        assert ticks(engine) == layer_counter.first_tick(pass_index=2, num_layers=NUM_LAYERS)
        tails = np.frombuffer(engine.tail_region.buffer[: 3 * 192], dtype=np.float32).reshape(3, 48)
        assert not tails[[0, 2]].any()
        assert tails[1].all()
        tick_ns = np.frombuffer(
            engine.counter_region.buffer[layer_counter.RING_OFFSET : layer_counter.RING_OFFSET + 9 * 8],
            dtype=np.int64,
        )
        assert first.started_ns < tick_ns[1] < tick_ns[4] <= first.ended_ns < tick_ns[5] < tick_ns[8]


async def test_kv_of_two_processes_in_other_cuts_has_equal_bytes(checkpoint: Path) -> None:
    token_ids = [token_id % VOCAB_SIZE for token_id in range(0, 500, 7)]
    pages = (3, 1, 0, 2, 7)
    async with running(checkpoint) as whole, running(checkpoint) as cut:
        assert whole.info.model_fingerprint == cut.info.model_fingerprint
        await whole.run(Batch(pass_index=0, chunks=(chunk_of(token_ids, 0, 70, pages=pages),)))
        for pass_index, (start, stop) in enumerate([(0, 1), (1, 31), (31, 64), (64, 70)]):
            await cut.run(Batch(pass_index=pass_index, chunks=(chunk_of(token_ids, start, stop, pages=pages),)))
        assert np.array_equal(whole_kv(whole), whole_kv(cut))
        assert whole_kv(whole).any()


async def test_decode_from_copied_kv_gives_the_tokens_of_a_local_prefill(checkpoint: Path) -> None:
    """What a handoff does: all but the last prompt token elsewhere, the bytes moved, the last token here."""
    prompt = list(range(30, 63))
    sampled: list[tuple[tuple[SequenceId, tuple[int, ...]], ...]] = []
    async with running(checkpoint) as prefill, running(checkpoint) as decode:
        await prefill.run(Batch(pass_index=0, chunks=(chunk_of(prompt, 0, 32, pages=(0, 1), tail_slot=0),)))
        host_buffer(decode.kv_regions[0])[:] = host_buffer(prefill.kv_regions[0])[:]
        for pass_index, (start, pages) in enumerate([(32, (0, 1, 2)), (0, (10, 11, 12))]):
            chunk = chunk_of(prompt, start, 33, pages=pages, sequence_id=pass_index, samples=True)
            news = (new_sequence(pass_index, prompt, temperature=1.5),)
            result = await decode.run(Batch(pass_index=pass_index, chunks=(chunk,), new_sequences=news))
            sampled.append(result.sampled)
    assert sampled[0][0][1] == sampled[1][0][1]


async def test_bfloat16_engine_runs_in_plain_torch(checkpoint: Path) -> None:
    async with running(checkpoint, dtype="bfloat16") as engine:
        assert engine.info.sharding.layout.slot_bytes == 64
        chunk = chunk_of([1, 2, 3], 0, 3, pages=(5,), samples=True, tail_slot=0)
        result = await engine.run(Batch(pass_index=0, chunks=(chunk,), new_sequences=(new_sequence(0, [1, 2, 3]),)))
        assert len(result.sampled) == 1
        tail = torch.frombuffer(bytearray(engine.tail_region.buffer[:96]), dtype=torch.bfloat16)
        assert tail.isfinite().all()


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (Batch(pass_index=1, chunks=()), "pass 1 came where pass 0 was due"),
        (Batch(pass_index=0, chunks=()), "no chunks"),
        (Batch(pass_index=0, chunks=(chunk_of([1], 0, 1, pages=(32,)),)), r"outside \[0, 32\)"),
        (Batch(pass_index=0, chunks=(chunk_of([1] * 17, 0, 17, pages=(0,)),)), "1 pages do not hold 17 tokens"),
        (Batch(pass_index=0, chunks=(chunk_of([VOCAB_SIZE], 0, 1, pages=(0,)),)), "a token is outside"),
        (Batch(pass_index=0, chunks=(chunk_of([1], 0, 1, pages=(0,), tail_slot=3),)), "tail slot 3 is outside"),
        (Batch(pass_index=0, chunks=(chunk_of([1], 0, 1, pages=(0,), samples=True),)), "was not announced"),
    ],
    ids=["gap", "empty", "page", "short-table", "token", "tail", "unknown"],
)
async def test_batch_that_breaks_the_contract_fails_it_and_all_later_ones(
    batch: Batch, message: str, checkpoint: Path
) -> None:
    async with running(checkpoint) as engine:
        with pytest.raises(InternalError, match=message):
            await engine.run(batch)
        assert not whole_kv(engine).any()
        with pytest.raises(InternalError, match=message):
            await engine.run(Batch(pass_index=0, chunks=(chunk_of([1], 0, 1, pages=(0,)),)))


async def test_rank_that_is_killed_fails_the_pass_with_the_signal(checkpoint: Path) -> None:
    async with running(checkpoint) as engine:
        os.kill(engine.info.pids[0], signal.SIGSTOP)
        token_ids = [1] * 200
        running_pass = asyncio.create_task(
            engine.run(Batch(pass_index=0, chunks=(chunk_of(token_ids, 0, 200, pages=tuple(range(13))),)))
        )
        await asyncio.sleep(0)
        os.kill(engine.info.pids[0], signal.SIGKILL)
        with pytest.raises(InternalError, match=rf"rank 0 \(process {engine.info.pids[0]}\) ended by SIGKILL"):
            await asyncio.wait_for(running_pass, DEADLINE_S)


async def test_rank_ignores_the_interrupt_of_the_terminal(checkpoint: Path) -> None:
    async with running(checkpoint) as engine:
        os.kill(engine.info.pids[0], signal.SIGINT)
        await engine.run(Batch(pass_index=0, chunks=(chunk_of([1], 0, 1, pages=(0,)),)))


async def test_pass_during_another_pass_is_refused(checkpoint: Path) -> None:
    async with running(checkpoint) as engine:
        batches = [Batch(pass_index=index, chunks=(chunk_of([1], 0, 1, pages=(0,)),)) for index in range(2)]
        os.kill(engine.info.pids[0], signal.SIGSTOP)
        first = asyncio.create_task(engine.run(batches[0]))
        await asyncio.sleep(0)
        with pytest.raises(InternalError, match="pass 1 came while another pass was running"):
            await engine.run(batches[1])
        os.kill(engine.info.pids[0], signal.SIGCONT)
        assert (await asyncio.wait_for(first, DEADLINE_S)).pass_index == 0
        await engine.run(batches[1])


async def test_closed_engine_has_no_process_left(checkpoint: Path) -> None:
    async with running(checkpoint) as engine:
        pid = engine.info.pids[0]
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    with pytest.raises(InternalError, match="the engine is closed"):
        await engine.run(Batch(pass_index=0, chunks=()))


@pytest.mark.parametrize("dtype", ["float32", "int8"])
async def test_engine_that_cannot_start_says_why(dtype: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json|dtype 'int8'"):
        await start_engine(spec_of(tmp_path, dtype=dtype))
