"""Geometry of the paged KV cache of one rank: where each byte of each page is.

A region is `[layer][page][head][K,V][slot][dim]` (HND). The heads come before K/V and before the slots, so any range of
heads of one page in one layer is one contiguous run of bytes (DESIGN section 4).

With multi-head latent attention (MLA) a token has one latent vector for all heads, and no V:
`[layer][page][slot][dim]`, which is the same with one head and one plane.
"""

import msgspec

from pdserve.errors import LayoutMismatch
from pdserve.units import div_ceil

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class KvLayout(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The shape of the KV cache that one rank holds. Travels in the handshake; the pool's size is not part of it."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    page_slots: int
    dtype: str
    num_planes: int = 2
    """Vectors of one token in one head: K and V, or the latent alone."""

    @property
    def slot_bytes(self) -> int:
        """Bytes of one vector: K, V or latent of one token in one head."""
        return self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def head_bytes(self) -> int:
        """Bytes of all planes of one head of one page in one layer."""
        return self.num_planes * self.page_slots * self.slot_bytes

    @property
    def page_bytes(self) -> int:
        """Bytes of one page in one layer: what one write moves."""
        return self.num_kv_heads * self.head_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes of KV of one token over all layers."""
        return self.num_layers * self.num_kv_heads * self.num_planes * self.slot_bytes

    def layer_bytes(self, num_pages: int) -> int:
        """Distance from a page in one layer to the same page in the next."""
        return num_pages * self.page_bytes

    def region_bytes(self, num_pages: int) -> int:
        return self.num_layers * self.layer_bytes(num_pages)

    def page_offset(self, *, layer_index: int, page_index: int, num_pages: int) -> int:
        """Byte offset in the region of a page in a layer."""
        return layer_index * self.layer_bytes(num_pages) + page_index * self.page_bytes

    def num_pages_for(self, num_tokens: int) -> int:
        return div_ceil(num_tokens, self.page_slots)

    def require_equal(self, theirs: "KvLayout", *, peer: str) -> None:
        """Raises: `LayoutMismatch` naming the first field that differs."""
        for field in self.__struct_fields__:
            ours_value, theirs_value = getattr(self, field), getattr(theirs, field)
            if ours_value != theirs_value:
                raise LayoutMismatch(field=field, ours=ours_value, theirs=theirs_value, peer=peer)
