"""DeepSeek and Qwen3-MoE compute what `transformers` computes, in any chunks and in any batch."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.pure.paged_runs import (
    NUM_PAGES,
    Paged,
    chunk_of,
    logits_in_chunks,
    run_pass,
    shuffled_pages,
)
from tests.pure.tiny_checkpoints import MIXTURES, random_tokens, reference_logits, write_checkpoint

from pdserve.model.attention import SHORT_CHUNK, AttendToLatents, attend_causally
from pdserve.model.config import read_config
from pdserve.model.latent_attention import LatentAttention
from pdserve.model.weights import load_decoder

MAX_DIFFERENCE = 1e-4
NUM_TOKENS = 40
NUM_PROMPT = 20
"""Before what is decoded; longer than a chunk of guesses."""
STOPS = {
    "one chunk": [NUM_TOKENS],
    "chunks": [1, 17, 24, NUM_TOKENS],
    "prompt and steps": [1, 2, 29, *range(30, NUM_TOKENS + 1)],
}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    """Directory and reference of each."""
    dirs = {name: tmp_path_factory.mktemp(name) for name in MIXTURES}
    return {name: (model_dir, write_checkpoint(name, model_dir)) for name, model_dir in dirs.items()}


@pytest.mark.parametrize("name", MIXTURES)
def test_logits_in_any_chunks_equal_transformers(name: str, written: dict[str, tuple[Path, Any]]) -> None:
    model_dir, reference = written[name]
    token_ids = random_tokens(1, NUM_TOKENS)
    expected_TV = reference_logits(reference, token_ids)
    paged = Paged.load(model_dir)
    for stops in STOPS.values():
        assert (logits_in_chunks(paged, token_ids, stops) - expected_TV).abs().max() < MAX_DIFFERENCE


@pytest.mark.parametrize("name", ["qwen3-moe", "deepseek-v2", "deepseek-v3-yarn"])
def test_logits_of_prompts_and_steps_in_one_batch_equal_transformers(
    name: str, written: dict[str, tuple[Path, Any]]
) -> None:
    model_dir, reference = written[name]
    paged = Paged.load(model_dir)
    sequences = [random_tokens(10 + index, length) for index, length in enumerate([30, 12, 41])]
    pages = shuffled_pages(2)
    tables = [pages[index * 6 : (index + 1) * 6] for index in range(3)]
    assert len(pages) == NUM_PAGES
    # Two have a prompt before the pass in which they step; the third one's chunk ends inside a page.
    before = [29, 11, 20]
    chunks = [
        chunk_of(token_ids, 0, stop, table, sequence_id=index)
        for index, (token_ids, stop, table) in enumerate(zip(sequences, before, tables, strict=True))
    ]
    run_pass(paged, chunks)
    chunks = [
        chunk_of(token_ids, start, len(token_ids), table, sequence_id=index)
        for index, (token_ids, start, table) in enumerate(zip(sequences, before, tables, strict=True))
    ]
    logits_TV = run_pass(paged, chunks)
    expected_TV = torch.cat(
        [reference_logits(reference, token_ids)[start:] for token_ids, start in zip(sequences, before, strict=True)]
    )
    assert (logits_TV - expected_TV).abs().max() < MAX_DIFFERENCE


@pytest.mark.parametrize("name", ["llama", "qwen3-moe", "deepseek-v3"])
def test_logits_without_kernels_equal_those_with_them(name: str, tmp_path: Path) -> None:
    """In plain torch, as in other dtypes and on other devices."""

    class Uncached:
        def attend(self, layer_index: int, *qkv: torch.Tensor) -> torch.Tensor:
            return attend_causally(*qkv)

        def attend_latents(
            self, layer_index: int, q_TND: torch.Tensor, latents_TL: torch.Tensor, attend_one: AttendToLatents
        ) -> torch.Tensor:
            return attend_one(q_TND, latents_TL)

    write_checkpoint(name, tmp_path)
    token_ids = random_tokens(6, 40)
    decoder = load_decoder(tmp_path, read_config(tmp_path), dtype=torch.float32, device=torch.device("cpu"))
    with torch.inference_mode():
        x_TE = decoder(torch.tensor(token_ids), torch.arange(40), Uncached(), list[int]().append)
        logits_TV = decoder.logits(decoder.final_norm(x_TE))
    assert (logits_TV - logits_in_chunks(Paged.load(tmp_path), token_ids, [40])).abs().max() < MAX_DIFFERENCE


@pytest.mark.parametrize("name", ["qwen3-moe", "deepseek-v2", "deepseek-v3-yarn"])
def test_logits_in_bfloat16_are_near_those_of_transformers_in_float32(
    name: str, written: dict[str, tuple[Path, Any]]
) -> None:
    """8 bits of mantissa leave some percent; what chooses the experts is kept in float32."""
    model_dir, reference = written[name]
    token_ids = random_tokens(1, NUM_TOKENS)
    expected_TV = reference_logits(reference, token_ids)
    logits_TV = logits_in_chunks(Paged.load(model_dir, dtype="bfloat16"), token_ids, [20, 39, NUM_TOKENS])
    assert (logits_TV - expected_TV).abs().mean() < 0.05 * expected_TV.std()


def test_absorbed_and_expanded_attention_agree(written: dict[str, tuple[Path, Any]]) -> None:
    """The rows of a chunk of guesses, which are absorbed, against those of a chunk that is too long for that."""
    model_dir, _ = written["deepseek-v3-yarn"]
    decoder = load_decoder(model_dir, read_config(model_dir), dtype=torch.float32, device=torch.device("cpu"))
    attention = decoder.decoder_layers()[1].attention
    assert isinstance(attention, LatentAttention)
    latent = attention.latent
    random = torch.Generator().manual_seed(3)
    q_dim = latent.plain_dim + latent.rotary_dim
    q_QND = torch.randn(SHORT_CHUNK + 1, attention.num_heads, q_dim, generator=random)
    latents_CL = torch.randn(33, latent.cache_dim, generator=random)
    with torch.inference_mode():
        expanded = attention.attend_one(q_QND, latents_CL)[1:]
        absorbed = attention.attend_one(q_QND[1:], latents_CL)
    assert not torch.equal(absorbed, expanded)
    assert (absorbed - expanded).abs().max() < 1e-4


@pytest.mark.parametrize("name", ["qwen3-moe", "deepseek-v2", "deepseek-v3-yarn"])
def test_logits_of_guesses_that_are_verified_have_the_bits_of_steps(
    name: str, written: dict[str, tuple[Path, Any]]
) -> None:
    model_dir, _ = written[name]
    token_ids = random_tokens(9, NUM_PROMPT + 2 * SHORT_CHUNK)
    steps = [NUM_PROMPT, *range(NUM_PROMPT + 1, len(token_ids) + 1)]
    paged = Paged.load(model_dir)
    expected_TV = logits_in_chunks(paged, token_ids, steps)
    for num_tokens in (2, 5, SHORT_CHUNK):
        stops = [*range(NUM_PROMPT, len(token_ids), num_tokens), len(token_ids)]
        assert torch.equal(logits_in_chunks(paged, token_ids, stops), expected_TV)


def test_softmax_scale_of_deepseek_v2_follows_its_own_code_where_transformers_forgets_it(tmp_path: Path) -> None:
    """`transformers` 4.57 reads mscale_all_dim for V3 alone; DeepSeek's code for V2 has it too."""
    reference = write_checkpoint("deepseek-v2-mscale", tmp_path)
    for layer in reference.model.layers:
        layer.self_attn.scaling *= (0.1 * 0.707 * torch.tensor(4.0).log().item() + 1) ** 2
    token_ids = random_tokens(7, NUM_TOKENS)
    logits_TV = logits_in_chunks(Paged.load(tmp_path), token_ids, [30, NUM_TOKENS])
    assert (logits_TV - reference_logits(reference, token_ids)).abs().max() < MAX_DIFFERENCE
