"""A head beside the toy model: it keeps a cache of its own, and its guesses do not matter.

The pair of token j (the token, and the hidden state of the token before) is at position j - 1 of its cache.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from tests.pure.toy_kv import RankKv
from tests.pure.toy_model import VECTOR_BYTES, digest, reference_tail, vector_of

from pdserve.errors import InternalError
from pdserve.ids import SequenceId
from pdserve.kv.layout import KvLayout
from pdserve.kv.shard import KvSharding
from pdserve.schedule.batch import Chunk

DRAFT = KvLayout(num_layers=3, num_kv_heads=1, head_dim=2, page_slots=4, dtype="float32")


class ToyDrafter:
    """Lifetime: until `close`."""

    def __init__(self, layout: KvLayout, *, num_pages: int) -> None:
        self.kv = RankKv(KvSharding(layout=layout), rank=0, num_pages=num_pages)
        self._carries: dict[SequenceId, tuple[int, bytes]] = {}
        """How many tokens it has read of each sequence, and the hidden state of the last of them."""
        self._pairs: list[tuple[Chunk, list[bytes]]] = []

    def start(self, ended_sequences: Iterable[SequenceId]) -> None:
        """A pass starts."""
        self._pairs = []
        for sequence_id in ended_sequences:
            self._carries.pop(sequence_id, None)

    def follow(
        self, chunk: Chunk, kept: Sequence[int], hidden: Sequence[bytes], *, sampled: Sequence[int], carry: bytes | None
    ) -> None:
        """The tokens of a chunk that stay, with their hidden states, and the newest one, which the model has not read.

        Raises: `InternalError` when the hidden state of the token before the chunk is not known.
        """
        token_ids = [*(kept if chunk.start > 0 else kept[1:]), *sampled]
        before = [*self._before(chunk, carry), *hidden][: len(token_ids)]
        pairs = [pair_of(state, token_id) for state, token_id in zip(before, token_ids, strict=True)]
        self._pairs.append((chunk, pairs))
        self._carries[chunk.sequence_id] = (chunk.start + len(kept), hidden[-1])

    def compute(self, layer_index: int) -> None:
        """Write the vectors of all pairs of the pass in one layer."""
        for chunk, pairs in self._pairs:
            self.kv.write(chunk.page_indices, max(chunk.start - 1, 0), pairs, head=0, layer_index=layer_index)

    def close(self) -> None:
        self.kv.close()

    def _before(self, chunk: Chunk, carry: bytes | None) -> list[bytes]:
        if chunk.start == 0:
            return []
        if carry is not None:
            return [carry]
        stop, hidden = self._carries.get(chunk.sequence_id, (0, b""))
        if stop != chunk.start:
            raise InternalError(f"sequence {chunk.sequence_id} came to the drafter at token {chunk.start}, not {stop}")
        return [hidden]


def pair_of(hidden: bytes, token_id: int) -> bytes:
    return digest(hidden, token_id.to_bytes(4, "little"))


@lru_cache(maxsize=8192)
def reference_draft_kv(layout: KvLayout, draft_layout: KvLayout, token_ids: tuple[int, ...]) -> NDArray[np.uint8]:
    """Of the pairs of some tokens, one less: `[layer][head][plane][slot][byte]`. `layout` is the model's."""
    shape = (draft_layout.num_layers, 1, draft_layout.num_planes)
    if len(token_ids) < 2:
        return np.zeros((*shape, 0, VECTOR_BYTES), np.uint8)
    pair = pair_of(reference_tail(layout, token_ids[:-1]), token_ids[-1])
    vectors = b"".join(
        vector_of(pair, layer_index=layer_index, plane=plane)
        for layer_index in range(draft_layout.num_layers)
        for plane in range(draft_layout.num_planes)
    )
    before = reference_draft_kv(layout, draft_layout, token_ids[:-1])
    return np.concatenate([before, np.frombuffer(vectors, np.uint8).reshape(*shape, 1, VECTOR_BYTES)], axis=3)
