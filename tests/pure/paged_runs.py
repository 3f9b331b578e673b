"""Tiny models on the torch executor over a paged cache: one sequence in chunks, or several in one pass."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from pdserve.engine.kv_storage import TORCH_DTYPES, KvStorage
from pdserve.engine.torch_executor import TorchExecutor
from pdserve.ids import SequenceId
from pdserve.kv.shard import KvSharding
from pdserve.model.config import read_config
from pdserve.model.decoder import OnLayer
from pdserve.model.parallel import Communicator, SingleRank
from pdserve.model.weights import load_decoder
from pdserve.schedule.batch import Chunk

torch.set_num_threads(1)

NUM_PAGES = 24
PAGE_SLOTS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Paged:
    """One rank."""

    sharding: KvSharding
    storage: KvStorage
    executor: TorchExecutor

    @classmethod
    def load(cls, model_dir: Path, communicator: Communicator | None = None, *, dtype: str = "float32") -> "Paged":
        communicator = communicator or SingleRank()
        config = read_config(model_dir)
        decoder = load_decoder(
            model_dir, config, dtype=TORCH_DTYPES[dtype], device=torch.device("cpu"), communicator=communicator
        )
        sharding = KvSharding(
            layout=config.kv_layout(page_slots=PAGE_SLOTS, dtype=dtype), num_ranks=communicator.num_ranks
        )
        storage = KvStorage.create(layout=sharding.rank_layout, num_pages=NUM_PAGES)
        return cls(sharding=sharding, storage=storage, executor=TorchExecutor(decoder, storage))

    def run_alone(self, token_ids: Sequence[int], on_layer: OnLayer) -> None:
        """A prompt in one chunk, in the first pages."""
        pages = range(self.storage.layout.num_pages_for(len(token_ids)))
        self.executor.forward([chunk_of(token_ids, 0, len(token_ids), pages)], on_layer)


def chunk_of(token_ids: Sequence[int], start: int, stop: int, pages: Sequence[int], *, sequence_id: int = 0) -> Chunk:
    return Chunk(
        sequence_id=SequenceId(sequence_id),
        start=start,
        token_ids=tuple(token_ids[start:stop]),
        page_indices=tuple(pages),
        samples=True,
    )


def run_pass(paged: Paged, chunks: Sequence[Chunk]) -> torch.Tensor:
    """logits_TV of all tokens of the pass."""
    x_TE = paged.executor.forward(chunks, lambda layer_index: None)
    return paged.executor.logits(paged.executor.final_norm(x_TE))


def logits_in_chunks(paged: Paged, token_ids: Sequence[int], stops: Sequence[int]) -> torch.Tensor:
    """logits_TV of one sequence, computed in the chunks that end at `stops`."""
    pages = shuffled_pages(1)[: -(-len(token_ids) // PAGE_SLOTS)]
    starts = [0, *stops[:-1]]
    return torch.cat(
        [run_pass(paged, [chunk_of(token_ids, start, stop, pages)]) for start, stop in zip(starts, stops, strict=True)]
    )


def shuffled_pages(seed: int) -> list[int]:
    """All pages of the pool."""
    return [int(page_index) for page_index in np.random.default_rng(seed).permutation(NUM_PAGES)]
