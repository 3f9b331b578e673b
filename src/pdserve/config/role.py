"""What a worker does."""

from enum import Enum


class Role(Enum):
    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"
    """Colocated: prefills and decodes its own requests, and takes grants of others."""
