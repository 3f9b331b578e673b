"""The regions of one rank process, whose descriptors travel in this order: KV; from rank 0 tail, counter and, where
there is a drafter, its KV. Torch-free."""

import os
from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.engine.region import Region, map_region
from pdserve.errors import InternalError
from pdserve.shared_region import SharedRegion


@dataclass(frozen=True, slots=True, kw_only=True)
class LeadRegions:
    """What rank 0 has beside its part of the model's KV."""

    tail: SharedRegion
    counter: SharedRegion
    draft_kv: Region | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRegions:
    kv: Region
    lead: LeadRegions | None

    @property
    def all(self) -> tuple[Region, ...]:
        if self.lead is None:
            return (self.kv,)
        draft_kv = () if self.lead.draft_kv is None else (self.lead.draft_kv,)
        return (self.kv, self.lead.tail, self.lead.counter, *draft_kv)

    def close(self) -> None:
        """Unmaps them. Requires: no views are left."""
        for region in self.all:
            region.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionsToMap:
    """What the main process knows of a rank's regions before it has them."""

    cuda_device: int | None
    kv_bytes: int
    is_lead: bool
    draft_kv_bytes: int | None

    def map(self, fds: Sequence[int]) -> RankRegions:
        """Takes ownership of the descriptors.

        Raises: `InternalError` for another number of them; `ConfigError` when the device refuses.
        """
        num_expected = 1 if not self.is_lead else 3 if self.draft_kv_bytes is None else 4
        if len(fds) != num_expected:
            for fd in fds:
                os.close(fd)
            raise InternalError(f"a rank process sent {len(fds)} regions where {num_expected} were due")
        kv = map_region(fds[0], num_bytes=self.kv_bytes, cuda_device=self.cuda_device)
        if not self.is_lead:
            return RankRegions(kv=kv, lead=None)
        draft_kv = None
        if self.draft_kv_bytes is not None:
            draft_kv = map_region(fds[3], num_bytes=self.draft_kv_bytes, cuda_device=self.cuda_device)
        lead = LeadRegions(tail=SharedRegion.from_fd(fds[1]), counter=SharedRegion.from_fd(fds[2]), draft_kv=draft_kv)
        return RankRegions(kv=kv, lead=lead)
