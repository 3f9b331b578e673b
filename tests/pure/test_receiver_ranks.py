"""The decode side over tensor and data parallel ranks: what is counted, and whose pages and outcomes are whose."""

import pytest
from msgspec.structs import replace
from tests.pure.decode_side import LAYOUT, PREFILL, DecodeSide

from pdserve.errors import CapacityError, FabricError, PeerLost
from pdserve.fabric.port import Fenced
from pdserve.ids import Incarnation
from pdserve.kv.layout import KvLayout
from pdserve.kv.shard import KvSharding
from pdserve.transfer.limits import ReceiverLimits
from pdserve.transfer.outcome import HandoffFailed, HandoffLanded

OTHER = Incarnation(3)


def ranks(num_ranks: int) -> KvSharding:
    """Of 2 KV heads."""
    return KvSharding(layout=LAYOUT, num_ranks=num_ranks)


@pytest.fixture
def side() -> DecodeSide:
    return DecodeSide(num_dp_ranks=2)


def free_pages(side: DecodeSide) -> list[int]:
    return [pool.num_free for pool in side.pools]


# Tensor parallel ranks


@pytest.mark.parametrize(
    ("prefill_ranks", "decode_ranks", "writes_a_page"),
    [(1, 1, 1), (2, 1, 2), (1, 2, 2), (2, 2, 2), (4, 1, 2), (1, 4, 4), (4, 2, 2), (2, 4, 4), (4, 4, 4), (6, 8, 8)],
)
def test_open_expects_a_write_for_each_pair_of_ranks_that_shares_heads(
    prefill_ranks: int, decode_ranks: int, writes_a_page: int
) -> None:
    """Of the replicas on the prefill side one writes; on the decode side all are written to."""
    side = DecodeSide(sharding=ranks(decode_ranks))
    side.join(OTHER, ranks(prefill_ranks))
    grant = side.open(num_tokens=10, peer=OTHER)
    assert len(grant.page_indices) == 3
    assert side.fabric.expected[grant.immediate].num_writes == 3 * LAYOUT.num_layers * writes_a_page + 1


def test_handoffs_from_two_peers_are_counted_by_the_sharding_of_each(side: DecodeSide) -> None:
    side.join(OTHER, ranks(2))
    one, two = side.open(peer=PREFILL), side.open(peer=OTHER)
    num_pages = len(one.page_indices)
    assert side.fabric.expected[one.immediate].num_writes == num_pages * LAYOUT.num_layers + 1
    assert side.fabric.expected[two.immediate].num_writes == num_pages * LAYOUT.num_layers * 2 + 1


def test_exposed_regions_are_those_of_every_rank_under_keys_of_their_own() -> None:
    side = DecodeSide(num_dp_ranks=2, sharding=ranks(4))
    side.join(OTHER)
    assert [len(regions.kv) for regions in side.regions[OTHER]] == [4, 4]
    exposures = [*side.exposures(PREFILL), *side.exposures(OTHER)]
    assert len(set(exposures)) == len(exposures) == 2 * 2 * (4 + 1)


def test_drafters_cache_is_counted_once_whatever_the_ranks_and_exposed_and_fenced_with_the_rest() -> None:
    draft_layout = replace(LAYOUT, num_layers=3, num_kv_heads=1)
    side = DecodeSide(sharding=ranks(4), draft_layout=draft_layout)
    grant = side.open(num_tokens=10)
    assert side.fabric.expected[grant.immediate].num_writes == 3 * (LAYOUT.num_layers * 4 + 3) + 1
    assert len(side.exposures(PREFILL)) == 4 + 1 + 1
    side.receiver.peer_lost(PREFILL)
    assert side.fabric.fenced == side.exposures(PREFILL)
    *early, last = side.exposures(PREFILL)
    for exposure in early:
        side.receiver.on_fabric_event(Fenced(exposure=exposure), now_ns=0)
    assert not side.is_whole()
    side.receiver.on_fabric_event(Fenced(exposure=last), now_ns=0)
    assert side.is_whole()


@pytest.mark.parametrize("draft_layout", [None, LAYOUT])
@pytest.mark.parametrize("num_exposable", range(6))
def test_regions_that_can_not_all_be_exposed_are_fenced_again(
    num_exposable: int, draft_layout: KvLayout | None
) -> None:
    side = DecodeSide(num_dp_ranks=2, sharding=ranks(2), draft_layout=draft_layout)
    num_before = len(side.fabric.exposed)
    side.fabric.max_exposures = num_before + num_exposable
    with pytest.raises(FabricError, match="no key for region"):
        side.receiver.expose()
    assert sorted(side.fabric.fenced, key=str) == sorted(side.fabric.exposed[num_before:], key=str)
    assert len(side.fabric.fenced) == num_exposable


# Data parallel ranks


def test_open_takes_the_pages_of_the_rank_that_it_names(side: DecodeSide) -> None:
    grant = side.open(num_tokens=13, dp_rank=1)
    assert grant.dp_rank == 1
    assert free_pages(side) == [side.num_pages, side.num_pages - 3]


def test_handoffs_of_two_ranks_share_page_numbers_and_tail_slots_but_no_immediate(side: DecodeSide) -> None:
    first, second = side.open(dp_rank=0), side.open(dp_rank=1)
    assert (first.page_indices, first.tail_slot) == (second.page_indices, second.tail_slot)
    assert first.immediate != second.immediate
    assert first.handoff_id != second.handoff_id


def test_rank_without_pages_leaves_room_on_the_other(side: DecodeSide) -> None:
    side.open(num_tokens=4 * 16 + 1, dp_rank=0)
    with pytest.raises(CapacityError, match="pages wanted"):
        side.open(dp_rank=0)
    assert side.open(dp_rank=1).dp_rank == 1


def test_rank_without_tail_slots_leaves_room_on_the_other(side: DecodeSide) -> None:
    for _ in range(side.num_tail_slots):
        side.open(dp_rank=0)
    with pytest.raises(CapacityError, match="tail slots are in use"):
        side.open(dp_rank=0)
    assert side.open(dp_rank=1).dp_rank == 1


def test_rank_with_all_the_handoffs_it_may_have_leaves_room_on_the_other() -> None:
    side = DecodeSide(num_dp_ranks=2, num_tail_slots=2, limits=ReceiverLimits(max_handoffs=2))
    for dp_rank in (0, 1):
        for _ in range(2):
            side.open(dp_rank=dp_rank)
        with pytest.raises(CapacityError):
            side.open(dp_rank=dp_rank)
    assert side.receiver.num_open == 4


def test_outcomes_are_taken_by_the_rank_whose_handoffs_they_were(side: DecodeSide) -> None:
    landed, failed = side.open(dp_rank=1), side.open(dp_rank=0)
    side.all_land(landed)
    side.refused(failed)
    (of_first,), (of_second,) = side.receiver.take_outcomes(0), side.receiver.take_outcomes(1)
    assert isinstance(of_first, HandoffFailed) and of_first.handoff_id == failed.handoff_id
    assert isinstance(of_second, HandoffLanded) and of_second.handoff_id == landed.handoff_id
    assert side.receiver.take_outcomes(0) == side.receiver.take_outcomes(1) == []


def test_confirmed_cancel_gives_pages_and_tail_slot_back_to_their_rank(side: DecodeSide) -> None:
    kept = side.open(dp_rank=0)
    grants = [side.open(dp_rank=1) for _ in range(side.num_tail_slots)]
    side.cancel(grants[2].handoff_id)
    side.stopped(grants[2])
    assert free_pages(side) == [side.num_pages - 2, side.num_pages - 2 * (side.num_tail_slots - 1)]
    assert side.open(dp_rank=1).tail_slot == grants[2].tail_slot
    assert side.open(dp_rank=0).tail_slot == kept.tail_slot + 1


def test_quarantine_of_one_rank_does_not_stop_handoffs_to_the_other(side: DecodeSide) -> None:
    grant = side.open(num_tokens=4 * 9 + 1, dp_rank=1)  # 9 of 16 pages
    side.cancel(grant.handoff_id)
    assert [side.receiver.num_quarantined_pages(dp_rank) for dp_rank in (0, 1)] == [0, 9]
    assert [side.receiver.accepts_handoffs(dp_rank) for dp_rank in (0, 1)] == [True, False]
    side.stopped(grant)
    assert side.receiver.accepts_handoffs(1)


def test_lost_peer_fails_the_handoffs_of_all_ranks_and_keeps_their_pages_until_the_last_fence() -> None:
    """A region of either rank may still be written to: the fences are waited for together."""
    side = DecodeSide(num_dp_ranks=2, sharding=ranks(2))
    for dp_rank in (0, 1):
        side.open(dp_rank=dp_rank)
    side.receiver.peer_lost(PREFILL)
    for dp_rank in (0, 1):
        (outcome,) = side.receiver.take_outcomes(dp_rank)
        assert isinstance(outcome, HandoffFailed) and isinstance(outcome.error, PeerLost)
    *early, last = side.exposures(PREFILL)
    assert side.fabric.fenced == [*early, last]
    for exposure in early:
        side.receiver.on_fabric_event(Fenced(exposure=exposure), now_ns=0)
    assert free_pages(side) == [side.num_pages - 2] * 2
    assert not side.receiver.can_join(PREFILL)
    side.receiver.on_fabric_event(Fenced(exposure=last), now_ns=0)
    assert side.is_whole()
    assert side.receiver.can_join(PREFILL)
