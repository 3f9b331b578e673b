"""The descriptors of a rank's regions: one side sends them, the other maps them."""

import os

import pytest

from pdserve.engine.rank_regions import LeadRegions, RankRegions, RegionsToMap
from pdserve.errors import InternalError
from pdserve.shared_region import SharedRegion

KV_BYTES = 4096


def created(*, is_lead: bool, has_drafter: bool) -> RankRegions:
    def region(name: str) -> SharedRegion:
        made = SharedRegion.create(name=name, num_bytes=KV_BYTES)
        made.buffer[:8] = name.encode().ljust(8)
        return made

    lead = None
    if is_lead:
        draft_kv = region("draft-kv") if has_drafter else None
        lead = LeadRegions(tail=region("tail"), counter=region("counter"), draft_kv=draft_kv)
    return RankRegions(kv=region("kv"), lead=lead)


def to_map(*, is_lead: bool, has_drafter: bool) -> RegionsToMap:
    return RegionsToMap(
        cuda_device=None, kv_bytes=KV_BYTES, is_lead=is_lead, draft_kv_bytes=KV_BYTES if has_drafter else None
    )


@pytest.mark.parametrize(("is_lead", "has_drafter"), [(False, False), (False, True), (True, False), (True, True)])
def test_regions_are_mapped_as_what_they_were_created(is_lead: bool, has_drafter: bool) -> None:
    """Where there is a drafter the ranks that don't lead know of it, and have no part of it."""
    ours = created(is_lead=is_lead, has_drafter=has_drafter)
    theirs = to_map(is_lead=is_lead, has_drafter=has_drafter).map([os.dup(region.fd) for region in ours.all])
    names = [bytes(region.buffer[:8]).rstrip() for region in theirs.all if isinstance(region, SharedRegion)]
    expected = [b"kv", b"tail", b"counter", b"draft-kv"]
    assert names == expected[: 1 if not is_lead else 4 if has_drafter else 3]
    assert (theirs.lead is not None) == is_lead
    if theirs.lead is not None:
        assert (theirs.lead.draft_kv is not None) == has_drafter
    theirs.close()
    ours.close()


@pytest.mark.parametrize(("is_lead", "has_drafter", "due"), [(False, True, 1), (True, False, 3), (True, True, 4)])
def test_another_number_of_regions_is_refused_and_leaks_no_descriptor(
    is_lead: bool, has_drafter: bool, due: int
) -> None:
    for num_sent in {0, 1, 2, 3, 4} - {due}:
        fds = [os.memfd_create("region") for _ in range(num_sent)]
        with pytest.raises(InternalError, match=rf"sent {num_sent} regions where {due} were due"):
            to_map(is_lead=is_lead, has_drafter=has_drafter).map(fds)
        for fd in fds:
            with pytest.raises(OSError, match="Bad file descriptor"):
                os.fstat(fd)
