"""Which rank of a tensor parallel group holds which KV heads.

Ranks hold equal runs of heads. Where there are more ranks than heads, each head is held by a run of ranks, a **replica
set**: R = ranks / heads, and ranks [h * R, (h + 1) * R) hold head h. MLA, with its one latent "head", is the case in
which all ranks are one replica set. Query heads are cut in the same order, so the ranks of a replica set hold exactly
the query heads that read their KV head.
"""

import msgspec

from pdserve.errors import ConfigError
from pdserve.kv.layout import KvLayout


class KvSharding(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A KV cache spread over ranks. Travels in the handshake, so it may be invalid: see `problem`."""

    layout: KvLayout
    """Of the whole cache: all KV heads of the model."""
    num_ranks: int = 1

    @property
    def problem(self) -> str | None:
        """Why no cache can be spread like this, or None."""
        num_heads, num_ranks = self.layout.num_kv_heads, self.num_ranks
        if min(num_heads, num_ranks) < 1 or (num_heads % num_ranks and num_ranks % num_heads):
            return f"tensor parallel size {num_ranks} neither divides {num_heads} KV heads nor is a multiple of them"
        return None

    def require_valid(self) -> None:
        """Raises: `ConfigError` when the ranks do not divide the heads."""
        if self.problem is not None:
            raise ConfigError(self.problem)

    @property
    def heads_per_rank(self) -> int:
        return max(1, self.layout.num_kv_heads // self.num_ranks)

    @property
    def num_replicas(self) -> int:
        """Ranks that hold the same heads: the size of each replica set."""
        return max(1, self.num_ranks // self.layout.num_kv_heads)

    @property
    def num_replica_sets(self) -> int:
        return self.num_ranks // self.num_replicas

    def heads_of_set(self, set_index: int) -> range:
        return range(set_index * self.heads_per_rank, (set_index + 1) * self.heads_per_rank)

    def ranks_of_set(self, set_index: int) -> range:
        return range(set_index * self.num_replicas, (set_index + 1) * self.num_replicas)

    def heads_of(self, rank: int) -> range:
        """The KV heads that a rank holds."""
        return self.heads_of_set(rank // self.num_replicas)

    @property
    def rank_layout(self) -> KvLayout:
        """The geometry of each rank's region."""
        return msgspec.structs.replace(self.layout, num_kv_heads=self.heads_per_rank)
