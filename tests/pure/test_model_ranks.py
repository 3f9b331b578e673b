"""A model cut over ranks computes what the whole model computes, to the last bit."""

from pathlib import Path

import pytest
import torch
from tests.pure.paged_runs import Paged, logits_in_chunks
from tests.pure.thread_ranks import ThreadCommunicator, run_ranks
from tests.pure.tiny_checkpoints import CHECKPOINTS, MIXTURES, random_tokens, write_checkpoint

from pdserve.errors import ConfigError
from pdserve.model.config import read_config
from pdserve.model.decoder import Decoder
from pdserve.model.parallel import Communicator
from pdserve.model.weights import load_decoder

# Halves of the heads; replicas of each KV head, and ranks without hidden or feed-forward columns; latents on all ranks.
CUTS = [
    ("llama", 2),
    ("llama-tied", 6),
    ("qwen2", 3),
    ("qwen3", 6),
    ("qwen3-moe", 2),
    ("qwen3-moe-some-dense", 4),
    ("deepseek-v2", 2),
    ("deepseek-v2-lite", 3),
    ("deepseek-v3", 3),
    ("deepseek-v3-yarn", 2),
    ("deepseek-v3-yarn", 6),
]


@pytest.mark.parametrize(("name", "num_ranks"), CUTS)
def test_logits_and_cache_of_each_rank_have_the_bits_of_the_whole_model(
    name: str, num_ranks: int, tmp_path: Path
) -> None:
    write_checkpoint(name, tmp_path)
    token_ids = random_tokens(3, 50)

    def run(communicator: Communicator) -> tuple[torch.Tensor, Paged]:
        paged = Paged.load(tmp_path, communicator)
        return logits_in_chunks(paged, token_ids, [20, 48, 49, 50]), paged

    (whole_TV, whole), *_ = run_ranks(1, run)
    for rank, (logits_TV, paged) in enumerate(run_ranks(num_ranks, run)):
        assert torch.equal(logits_TV, whole_TV)
        held = paged.sharding.heads_of(rank)
        assert torch.equal(paged.storage.pages_LPHKSD, whole.storage.pages_LPHKSD[:, :, held.start : held.stop])


@pytest.mark.parametrize(("name", "num_ranks"), [("llama", 2), ("deepseek-v3", 3), ("qwen3-moe", 2)])
def test_layers_report_on_all_ranks_in_order_after_their_cache_is_written(
    name: str, num_ranks: int, tmp_path: Path
) -> None:
    """When one rank passes the gathered attention output of a layer, every rank has cached that layer."""
    write_checkpoint(name, tmp_path)
    token_ids = random_tokens(4, 9)
    storages: dict[int, torch.Tensor] = {}

    def run(communicator: Communicator) -> list[int]:
        paged = Paged.load(tmp_path, communicator)
        storages[communicator.rank] = paged.storage.pages_LPHKSD
        layers: list[int] = []

        def on_layer(layer_index: int) -> None:
            layers.append(layer_index)
            assert len(storages) == num_ranks
            for pages_LPHKSD in storages.values():
                largest_PS = pages_LPHKSD[layer_index].abs().amax(dim=(1, 2, 4))
                assert largest_PS.flatten()[: len(token_ids)].min() > 0

        paged.run_alone(token_ids, on_layer)
        return layers

    assert run_ranks(num_ranks, run) == [[0, 1, 2]] * num_ranks


@pytest.mark.parametrize("name", [*CHECKPOINTS, *MIXTURES])
def test_sources_name_each_parameter_and_no_other(name: str, tmp_path: Path) -> None:
    write_checkpoint(name, tmp_path)
    with torch.device("meta"):
        decoder = Decoder(read_config(tmp_path))
    tied = {"lm_head.weight"} if decoder.config.has_tied_embeddings else set[str]()
    assert set(decoder.sources()) | tied == {parameter_name for parameter_name, _ in decoder.named_parameters()}


@pytest.mark.parametrize(
    ("name", "num_ranks", "message"),
    [
        ("llama", 4, "does not divide the model's 6 attention heads"),
        ("llama", 3, "neither divides 2 KV heads nor is a multiple"),
        ("deepseek-v3", 4, "does not divide the model's 6 attention heads"),
    ],
)
def test_model_with_heads_that_the_ranks_do_not_divide_is_refused(
    name: str, num_ranks: int, message: str, tmp_path: Path
) -> None:
    write_checkpoint(name, tmp_path)
    communicator = ThreadCommunicator.alone(num_ranks=num_ranks)
    with pytest.raises(ConfigError, match=message):
        load_decoder(
            tmp_path,
            read_config(tmp_path),
            dtype=torch.float32,
            device=torch.device("cpu"),
            communicator=communicator,
        )
