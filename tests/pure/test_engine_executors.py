"""The two executors on tiny checkpoints: the same results for any cut, batch, page size and number of threads."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.pure.tiny_checkpoints import CHECKPOINTS, random_tokens, reference_logits, write_checkpoint

from pdserve._kernels import CpuKernels, PackedMatrix
from pdserve.bench.handoff_check import NATURAL_TEXT
from pdserve.engine.cpu_executor import CpuExecutor
from pdserve.engine.executor import Executor
from pdserve.engine.kv_storage import KvStorage
from pdserve.engine.torch_executor import TorchExecutor
from pdserve.ids import SequenceId
from pdserve.model.config import read_config
from pdserve.model.decoder import Decoder
from pdserve.model.smollm2 import prepare
from pdserve.model.weights import load_decoder
from pdserve.schedule.batch import Chunk
from pdserve.text.tokenizer import Tokenizer

MAX_DIFFERENCE = 1e-4
NUM_PAGES = 64
PAGE_SLOTS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    decoder: Decoder
    reference: Any


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checkpoint]:
    return {name: load(name, tmp_path_factory.mktemp(name)) for name in CHECKPOINTS}


def load(name: str, model_dir: Path) -> Checkpoint:
    reference = write_checkpoint(name, model_dir)
    config = read_config(model_dir)
    decoder = load_decoder(model_dir, config, dtype=torch.float32, device=torch.device("cpu"))
    return Checkpoint(decoder=decoder, reference=reference)


def storage_for(decoder: Decoder, *, page_slots: int = PAGE_SLOTS) -> KvStorage:
    layout = decoder.config.kv_layout(page_slots=page_slots, dtype="float32")
    return KvStorage.create(layout=layout, num_pages=NUM_PAGES)


def chunk_of(token_ids: list[int], start: int, stop: int, pages: Iterable[int], sequence_id: int = 0) -> Chunk:
    return Chunk(
        sequence_id=SequenceId(sequence_id),
        start=start,
        token_ids=tuple(token_ids[start:stop]),
        page_indices=tuple(pages),
        samples=True,
    )


def shuffled_pages(seed: int, num_pages: int) -> list[int]:
    return [int(page_index) for page_index in np.random.default_rng(seed).permutation(NUM_PAGES)[:num_pages]]


def all_logits(executor: Executor, token_ids: list[int], cuts: list[int], pages: list[int]) -> torch.Tensor:
    """logits_TV of one sequence, computed in the chunks that end at `cuts`."""
    logits: list[torch.Tensor] = []
    start = 0
    for stop in cuts:
        x_TE = executor.forward([chunk_of(token_ids, start, stop, pages)], lambda layer_index: None)
        logits.append(executor.logits(executor.final_norm(x_TE)))
        start = stop
    return torch.cat(logits)


@pytest.mark.parametrize("kind", [CpuExecutor, TorchExecutor])
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_logits_of_each_executor_in_chunks_equal_transformers(
    kind: type[CpuExecutor] | type[TorchExecutor], name: str, checkpoints: dict[str, Checkpoint]
) -> None:
    checkpoint = checkpoints[name]
    storage = storage_for(checkpoint.decoder)
    executor = (
        CpuExecutor(checkpoint.decoder, storage, num_threads=1)
        if kind is CpuExecutor
        else TorchExecutor(checkpoint.decoder, storage)
    )
    token_ids = random_tokens(5, 150)
    logits_TV = all_logits(executor, token_ids, [1, 33, 48, 149, 150], shuffled_pages(6, 10))
    assert (logits_TV - reference_logits(checkpoint.reference, token_ids)).abs().max() < MAX_DIFFERENCE


def test_logits_of_the_default_model_on_natural_text_equal_transformers() -> None:
    transformers: Any = pytest.importorskip("transformers")
    model_dir = prepare()
    decoder = load_decoder(model_dir, read_config(model_dir), dtype=torch.float32, device=torch.device("cpu"))
    executor = CpuExecutor(decoder, storage_for(decoder), num_threads=1)
    token_ids = Tokenizer.load(model_dir).encode(NATURAL_TEXT.read_text())[:150]
    reference = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    with torch.no_grad():
        reference_TV = reference(torch.tensor([token_ids])).logits[0]
    logits_TV = all_logits(executor, token_ids, [64, 150], shuffled_pages(8, 10))
    assert (logits_TV - reference_TV).abs().max() < MAX_DIFFERENCE


@given(cuts=st.sets(st.integers(1, 119), max_size=8), pages_seed=st.integers(0, 100))
@settings(max_examples=25)
def test_bits_of_the_cpu_executor_do_not_depend_on_cut_or_pages(
    cuts: set[int], pages_seed: int, checkpoints: dict[str, Checkpoint]
) -> None:
    decoder = checkpoints["qwen3"].decoder
    token_ids = random_tokens(8, 120)
    whole, cut = storage_for(decoder), storage_for(decoder)
    pages, whole_pages = shuffled_pages(pages_seed, 8), list(range(8))
    expected_TV = all_logits(CpuExecutor(decoder, whole, num_threads=1), token_ids, [120], whole_pages)
    logits_TV = all_logits(CpuExecutor(decoder, cut, num_threads=1), token_ids, [*sorted(cuts), 120], pages)
    assert torch.equal(logits_TV, expected_TV)
    assert torch.equal(cut.pages_LPHKSD[:, pages], whole.pages_LPHKSD[:, whole_pages])


def test_bits_of_the_cpu_executor_do_not_depend_on_the_rest_of_the_batch(checkpoints: dict[str, Checkpoint]) -> None:
    decoder = checkpoints["qwen2"].decoder
    lengths = [1, 40, 17, 2, 90, 33]
    sequences = [random_tokens(index, length) for index, length in enumerate(lengths)]
    pages = [shuffled_pages(3, 36)[6 * index : 6 * index + 6] for index in range(len(lengths))]
    executor = CpuExecutor(decoder, storage_for(decoder), num_threads=1)
    chunks = [chunk_of(token_ids, 0, len(token_ids), pages[index], index) for index, token_ids in enumerate(sequences)]
    together_TE = executor.forward(chunks, lambda layer_index: None)
    alone = CpuExecutor(decoder, storage_for(decoder), num_threads=1)
    alone_TE = torch.cat([alone.forward([chunk], lambda layer_index: None) for chunk in chunks])
    assert torch.equal(together_TE, alone_TE)


def test_bits_do_not_depend_on_threads_or_vector_width(checkpoints: dict[str, Checkpoint]) -> None:
    """Of the instruction sets, those with a fused multiply-add: the baseline rounds twice."""
    decoder = checkpoints["llama-llama3-rope"].decoder
    token_ids = random_tokens(9, 100)
    variants = [(3, "")] + [(1, name) for name in CpuKernels.instruction_sets() if name != "baseline"]
    expected_TV = all_logits(CpuExecutor(decoder, storage_for(decoder), num_threads=1), token_ids, [100], [*range(7)])
    for num_threads, instruction_set in variants:
        executor = CpuExecutor(decoder, storage_for(decoder), num_threads=num_threads, instruction_set=instruction_set)
        assert torch.equal(all_logits(executor, token_ids, [64, 100], [*range(7)]), expected_TV)


@pytest.mark.parametrize("instruction_set", CpuKernels.instruction_sets())
@pytest.mark.parametrize("page_slots", [4, 16, 40])
def test_logits_of_every_instruction_set_and_page_size_equal_transformers(
    instruction_set: str, page_slots: int, checkpoints: dict[str, Checkpoint]
) -> None:
    checkpoint = checkpoints["llama"]
    storage = storage_for(checkpoint.decoder, page_slots=page_slots)
    executor = CpuExecutor(checkpoint.decoder, storage, num_threads=1, instruction_set=instruction_set)
    token_ids = random_tokens(2, 100)
    logits_TV = all_logits(executor, token_ids, [50, 99, 100], shuffled_pages(1, 25))
    assert (logits_TV - reference_logits(checkpoint.reference, token_ids)).abs().max() < MAX_DIFFERENCE


def test_garbage_in_slots_not_yet_written_changes_nothing(checkpoints: dict[str, Checkpoint]) -> None:
    decoder = checkpoints["llama"].decoder
    token_ids = random_tokens(4, 37)
    clean, dirty = storage_for(decoder), storage_for(decoder)
    dirty.pages_LPHKSD.fill_(float("nan"))
    logits = [
        all_logits(CpuExecutor(decoder, storage, num_threads=1), token_ids, [20, 37], [5, 1, 9])
        for storage in (clean, dirty)
    ]
    assert torch.equal(logits[0], logits[1])


@given(rows=st.integers(1, 40), columns=st.integers(1, 100), depth=st.integers(1, 70), seed=st.integers(0, 1000))
@settings(max_examples=60)
def test_products_of_any_extents_equal_numpy(rows: int, columns: int, depth: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    x, weight = (random.standard_normal((count, depth), dtype=np.float32) for count in (rows, columns))
    bias = random.standard_normal(columns, dtype=np.float32)
    residual = random.standard_normal((rows, columns), dtype=np.float32)
    expected = x.astype(np.float64) @ weight.T.astype(np.float64) + bias
    for name in CpuKernels.instruction_sets():
        kernels, packed = CpuKernels(1, name), PackedMatrix.plain(weight, bias)
        out, added = np.empty_like(residual), residual.copy()
        kernels.linear(x, packed, out)
        kernels.linear_add(x, packed, added)
        np.testing.assert_allclose(out, expected, atol=1e-4)
        np.testing.assert_allclose(added, expected + residual, atol=1e-4)


@given(rows=st.integers(1, 30), columns=st.integers(1, 70), seed=st.integers(0, 1000), scale=st.sampled_from([1, 60]))
@settings(max_examples=40)
def test_gated_products_of_any_extents_equal_numpy(rows: int, columns: int, seed: int, scale: int) -> None:
    random = np.random.default_rng(seed)
    x = random.standard_normal((rows, 20), dtype=np.float32)
    gate = random.standard_normal((columns, 20), dtype=np.float32) * scale
    up = random.standard_normal((columns, 20), dtype=np.float32)
    gates = x.astype(np.float64) @ gate.T.astype(np.float64)
    expected = gates / (1 + np.exp(-np.clip(gates, -500, 500))) * (x.astype(np.float64) @ up.T.astype(np.float64))
    for name in CpuKernels.instruction_sets():
        out = np.empty((rows, columns), np.float32)
        CpuKernels(1, name).linear(x, PackedMatrix.swiglu(gate, up), out)
        np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-3)


def test_product_without_columns_is_empty() -> None:
    """What a rank has when there are fewer blocks of columns than ranks."""
    x, none = np.ones((3, 16), np.float32), np.zeros((0, 16), np.float32)
    out = np.empty((3, 0), np.float32)
    for name in CpuKernels.instruction_sets():
        kernels = CpuKernels(2, name)
        kernels.linear(x, PackedMatrix.plain(none), out)
        kernels.linear(x, PackedMatrix.swiglu(none, none), out)


def test_kernels_with_extents_that_do_not_match_are_refused(checkpoints: dict[str, Checkpoint]) -> None:
    kernels = CpuKernels(1)
    x_with_8 = np.zeros((2, 8), np.float32)
    packed = PackedMatrix.plain(np.zeros((8, 16), np.float32))
    with pytest.raises(ValueError, match="differ in depth"):
        kernels.linear(np.zeros((2, 17), np.float32), packed, np.zeros((2, 8), np.float32))
    with pytest.raises(ValueError, match="other extents than the product"):
        kernels.linear(np.zeros((2, 16), np.float32), packed, np.zeros((2, 9), np.float32))
    with pytest.raises(ValueError, match="multiple of 16"):
        kernels.rms_norm(x_with_8, np.zeros(8, np.float32), x_with_8.copy(), 1e-5)
    decoder = checkpoints["llama"].decoder
    executor = CpuExecutor(decoder, storage_for(decoder), num_threads=1)
    for chunk in (
        chunk_of([1] * 20, 0, 20, [3]),
        chunk_of([1], 0, 1, [NUM_PAGES]),
        chunk_of([1] * 300, 0, 300, [0] * 20),
    ):
        with pytest.raises(ValueError, match=r"page|position"):
            executor.forward([chunk], lambda layer_index: None)
