"""A head beside the model of hashes: it keeps a cache of its own, whose vectors come from pairs of a hidden state and
the token after it."""

from collections.abc import Iterable, Sequence

from pdserve.errors import InternalError
from pdserve.ids import SequenceId
from pdserve.kv.layout import KvLayout
from pdserve.kv.shard import KvSharding
from pdserve.schedule.batch import Chunk
from pdserve.simulate.model import draft_seed
from pdserve.simulate.rank_kv import RankKv


class HashDrafter:
    """On rank 0. Lifetime: until `close`."""

    def __init__(self, layout: KvLayout, *, num_pages: int) -> None:
        self.kv = RankKv(KvSharding(layout=layout), rank=0, num_pages=num_pages)
        self._carries: dict[SequenceId, tuple[int, bytes]] = {}
        """How many tokens it has read of each sequence, and the hidden state at the last of them."""
        self._seeds: list[tuple[Chunk, int, list[bytes]]] = []
        """Of the pass: the seeds of each chunk, from a position on."""

    def start(self, ended_sequences: Iterable[SequenceId]) -> None:
        """A pass starts."""
        self._seeds = []
        for sequence_id in ended_sequences:
            self._carries.pop(sequence_id, None)

    def follow(
        self, chunk: Chunk, kept: Sequence[int], hidden: Sequence[bytes], *, sampled: Sequence[int], carry: bytes | None
    ) -> None:
        """The tokens of a chunk that stay, with their hidden states, and the newest one, which the model has not read.

        Raises: `InternalError` for a chunk that does not follow what it has read.
        """
        before = self._before(chunk, carry)
        token_ids = [*(kept if before else kept[1:]), *sampled]
        states = [*before, *hidden][: len(token_ids)]
        seeds = [draft_seed(*pair) for pair in zip(states, token_ids, strict=True)]
        self._seeds.append((chunk, chunk.start - len(before), seeds))
        self._carries[chunk.sequence_id] = (chunk.start + len(kept), hidden[-1])

    def compute(self, layer_index: int) -> None:
        """Write the vectors of all pairs of the pass in one layer."""
        for chunk, start, seeds in self._seeds:
            self.kv.write(chunk.page_indices, start, seeds, head=0, layer_index=layer_index)

    def close(self) -> None:
        self.kv.close()

    def _before(self, chunk: Chunk, carry: bytes | None) -> list[bytes]:
        """The hidden state before the chunk; empty at the first token, and where a fork brought that pair with it."""
        if chunk.start == 0:
            return []
        if carry is not None:
            return [carry]
        if chunk.sequence_id not in self._carries:
            return []
        stop, hidden = self._carries[chunk.sequence_id]
        if stop != chunk.start:
            raise InternalError(f"sequence {chunk.sequence_id} came to the drafter at token {chunk.start}, not {stop}")
        return [hidden]
