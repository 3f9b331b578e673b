"""The cuts of one model over the ranks of a tensor parallel group."""

from dataclasses import dataclass

from pdserve.kv.shard import KvSharding
from pdserve.model.config import ModelConfig
from pdserve.model.parallel import Columns, Communicator, cut_columns, cut_heads


@dataclass(frozen=True, slots=True, kw_only=True)
class Cuts:
    """Which output columns each rank computes."""

    heads: Columns
    """Of the attention: whole query heads, `config.value_dim` columns each."""
    kv_heads: Columns
    """Of the K and of the V projection, `config.head_dim` columns a head. Replicas have the same ones."""
    hidden: Columns
    """Of what goes back into the residual: attention output and feed-forward down projections."""
    ffn: Columns
    """Of the dense layers' gate and up projections."""
    vocab: Columns

    @classmethod
    def of(cls, config: ModelConfig, communicator: Communicator) -> "Cuts":
        """Raises: `ConfigError` when the heads can't be spread over so many ranks."""
        return cls(
            heads=cut_heads(config.num_heads, columns_per_head=config.value_dim, communicator=communicator),
            kv_heads=_cut_kv_heads(config, communicator),
            hidden=cut_columns(config.hidden_dim, communicator),
            ffn=cut_columns(config.ffn_dim, communicator),
            vocab=cut_columns(config.vocab_size, communicator),
        )


def _cut_kv_heads(config: ModelConfig, communicator: Communicator) -> Columns:
    """As the cache is spread; which heads a rank holds does not depend on pages and dtype."""
    sharding = KvSharding(layout=config.kv_layout(page_slots=1, dtype="float32"), num_ranks=communicator.num_ranks)
    sharding.require_valid()
    heads = [sharding.heads_of(rank) for rank in range(communicator.num_ranks)]
    return Columns(
        ranges=tuple(range(held.start * config.head_dim, held.stop * config.head_dim) for held in heads),
        rank=communicator.rank,
    )
