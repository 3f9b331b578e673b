"""What a worker does."""

from enum import Enum


class Role(Enum):
    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"
    """Colocated: prefills and decodes its own requests; the gateway sends it no prefills of others."""
