"""A model cut over ranks computes what the whole model computes."""

from pathlib import Path

import pytest
import torch
from tests.pure.paged_runs import Paged, logits_in_chunks
from tests.pure.thread_ranks import run_ranks
from tests.pure.tiny_checkpoints import random_tokens, write_checkpoint

from pdserve.model.parallel import Communicator

# 6 query heads and 2 KV heads: halves, and replicas of each KV head; 3 query heads and 1 KV head.
DENSE = [("llama", 2), ("llama", 6), ("llama-tied", 2), ("llama-tied", 6), ("qwen3", 6), ("qwen2", 3)]


@pytest.mark.parametrize(("name", "num_ranks"), DENSE)
def test_logits_and_cache_of_each_rank_equal_those_of_the_whole_model(
    name: str, num_ranks: int, tmp_path: Path
) -> None:
    write_checkpoint(name, tmp_path)
    token_ids = random_tokens(3, 50)

    def run(communicator: Communicator) -> tuple[torch.Tensor, Paged]:
        paged = Paged.load(tmp_path, communicator)
        return logits_in_chunks(paged, token_ids, [20, 49, 50]), paged

    (whole_TV, whole), *_ = run_ranks(1, run)
    for rank, (logits_TV, paged) in enumerate(run_ranks(num_ranks, run)):
        assert (logits_TV - whole_TV).abs().max() < 1e-5
        held = paged.sharding.heads_of(rank)
        difference = paged.storage.pages_LPHKSD - whole.storage.pages_LPHKSD[:, :, held.start : held.stop]
        assert difference.abs().max() < 1e-5
