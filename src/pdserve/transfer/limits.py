"""How much each side of the messenger takes on, and how long it waits."""

from dataclasses import dataclass

FLUSH_TIMEOUT_S = 5.0
"""A delivery-complete write on a healthy link takes under 1 ms; a peer that can't give one in this time is dropped."""

MAX_FLUSHES = 4096
"""Under way at a time, of all peers: more than the handoffs that they can have open (H6)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiverLimits:
    max_handoffs: int = 1024
    """Handoffs in any state but CLOSED, for each data parallel rank: bounds its tail slots, and for all ranks together
    the immediates and the table. So no rank goes without because another holds many."""
    max_quarantined_share: float = 0.5
    """Over this share of a rank's pool in quarantine no handoff is opened: the request prefills locally (H2, H6)."""
    cancel_timeout_s: float = 10.0
    """A peer that does not confirm a cancel for so long is dropped, which leads to its fence."""
