"""What `config.json` says of multi-head latent attention (DeepSeek). Torch-free."""

from dataclasses import dataclass

from pdserve.model.json_fields import JsonFields


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentConfig:
    q_rank: int | None
    """Of the compressed query; None: queries are projected at once."""
    kv_rank: int
    """Of the latent from which all heads' keys and values are expanded."""
    plain_dim: int
    """Of a query and key head's part without positions."""
    rotary_dim: int
    """Of the rotary part; the key's is shared by all heads."""
    value_dim: int
    has_rotary_pairs: bool
    """The checkpoint has the two values that turn together side by side; otherwise half the dimension apart."""

    @property
    def cache_dim(self) -> int:
        """Of what is cached of a token: latent and rotary key."""
        return self.kv_rank + self.rotary_dim


def read_latent(fields: JsonFields) -> LatentConfig:
    return LatentConfig(
        q_rank=fields.optional_integer("q_lora_rank"),
        kv_rank=fields.integer("kv_lora_rank"),
        plain_dim=fields.integer("qk_nope_head_dim"),
        rotary_dim=fields.integer("qk_rope_head_dim"),
        value_dim=fields.integer("v_head_dim"),
        has_rotary_pairs=fields.flag("rope_interleave", default=True),
    )
