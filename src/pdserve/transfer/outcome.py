"""What becomes of a handoff on the decode side, as the receiver reports it."""

from dataclasses import dataclass

from pdserve.errors import CapacityError, HandoffError
from pdserve.fabric.port import Landed
from pdserve.ids import HandoffId, PageIndex, RequestId, TailSlot


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffLanded:
    """The request may be decoded; its pages and its tail slot belong to the caller now."""

    request_id: RequestId
    handoff_id: HandoffId
    page_indices: list[PageIndex]
    tail_slot: TailSlot
    """Until `release_tail_slot`: it holds the hidden state of the last prefilled position."""
    landed: Landed


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffFailed:
    """The handoff will not complete; its pages stay here until nobody may write them. The request may go elsewhere."""

    request_id: RequestId
    handoff_id: HandoffId
    error: HandoffError | CapacityError


Outcome = HandoffLanded | HandoffFailed
