"""What the sender checks in a grant and arms for a chunk, and whose messages it obeys."""

import numpy as np
import pytest
from msgspec.structs import replace
from tests.pure.prefill_side import DECODE, DRAFT_REGION, LAYOUT, PREFILL, TAIL_BYTES, PrefillSide, hello_of

from pdserve.errors import CapacityError, InternalError, RemoteProtocolError
from pdserve.fabric.port import PagePush, PushOutcome, SingleWrite
from pdserve.ids import HandoffId, Immediate, Incarnation, TailSlot
from pdserve.kv.layout import KvLayout
from pdserve.kv.shard import KvSharding
from pdserve.layer_counter import ticks_per_pass
from pdserve.transfer.destination import exposures_of
from pdserve.transfer.plan import rank_pairs
from pdserve.wire.peer import Cancel, Grant, HandoffStopped


@pytest.fixture
def side() -> PrefillSide:
    return PrefillSide()


def broken_grants(good: Grant) -> dict[str, Grant]:
    return {
        "nothing to prefill": replace(good, token_ids=(1,), page_indices=()),
        "of 12 tokens are held": replace(good, num_held_tokens=12, page_indices=()),
        "-4 of 12 tokens are held": replace(good, num_held_tokens=-4),
        "no whole pages of 4": replace(good, num_held_tokens=3),
        "tail slot -1 is outside": replace(good, tail_slot=TailSlot(-1)),
        "tail slot 16384 is outside": replace(good, tail_slot=TailSlot((1 << 20) // TAIL_BYTES)),
        "immediate -1 has no 32 bits": replace(good, immediate=Immediate(-1)),
        "immediate 4294967296 has no 32 bits": replace(good, immediate=Immediate(1 << 32)),
        "token -5 is negative": replace(good, token_ids=(*good.token_ids[:-1], -5)),
        "2 pages do not fit 12 tokens": replace(good, page_indices=good.page_indices[:-1]),
        "4 pages do not fit 12 tokens": replace(good, page_indices=(*good.page_indices, 30)),
        "outside \\[0, 32\\)": replace(good, page_indices=(20, 21, 32)),
        "a page index is outside": replace(good, page_indices=(20, 21, -1)),
        "granted twice": replace(good, page_indices=(20, 21, 20)),
        "data parallel rank -1 is outside \\[0, 1\\)": replace(good, dp_rank=-1),
        "data parallel rank 1 is outside \\[0, 1\\)": replace(good, dp_rank=1),
    }


@pytest.mark.parametrize("problem", broken_grants(PrefillSide().grant()))
def test_grant_that_contradicts_itself_is_a_protocol_error(side: PrefillSide, problem: str) -> None:
    with pytest.raises(RemoteProtocolError, match=problem):
        side.role.on_grant(DECODE, broken_grants(side.grant())[problem], now_ns=0)
    assert side.is_whole()


def test_grant_of_an_open_handoff_is_a_protocol_error(side: PrefillSide) -> None:
    grant = side.granted()
    with pytest.raises(RemoteProtocolError, match="granted before"):
        side.role.on_grant(DECODE, grant, now_ns=0)
    assert side.role.num_open == 1


@pytest.mark.parametrize(("sender", "receiver"), [(DECODE, Incarnation(99)), (Incarnation(98), PREFILL)])
def test_grant_of_another_incarnation_is_counted_and_dropped(
    side: PrefillSide, sender: Incarnation, receiver: Incarnation
) -> None:
    grant = replace(side.grant(), sender=sender, receiver=receiver)
    side.role.on_grant(DECODE, grant, now_ns=0)
    assert side.sender.num_stale_messages == 1
    assert side.is_whole()


def test_grant_over_an_unknown_connection_is_counted_and_dropped(side: PrefillSide) -> None:
    side.role.on_grant(Incarnation(98), side.grant(peer=Incarnation(98)), now_ns=0)
    assert side.sender.num_stale_messages == 1
    assert side.is_whole()


def test_cancel_of_another_incarnation_is_counted_and_stops_nothing(side: PrefillSide) -> None:
    grant = side.granted()
    message = Cancel(sender=DECODE, receiver=Incarnation(99), handoff_id=grant.handoff_id)
    side.role.on_cancel(DECODE, message, now_ns=0)
    assert side.sender.num_stale_messages == 1
    assert side.role.num_open == 1
    assert not side.fabric.flushes


def test_peer_that_is_connected_does_not_join_again(side: PrefillSide) -> None:
    with pytest.raises(InternalError, match="joined again before its last session was lost"):
        side.join(DECODE)


# What is armed


def test_arm_of_a_chunk_pushes_the_pages_it_completes(side: PrefillSide) -> None:
    side.granted(num_tokens=12)
    batch = side.start_pass()  # tokens [0, 6): page 0 is complete, page 1 is not
    (push,) = side.armed_pages()
    assert push.source_pages.tolist() == [batch.chunks[0].page_indices[0]]
    assert push.target_pages.tolist() == [20]
    assert push.source_pages.dtype == np.uint32
    assert push.first_tick == 0
    assert not [push for push in side.fabric.armed.values() if isinstance(push, SingleWrite)]


def test_arm_of_the_last_chunk_pushes_the_open_page_and_the_tail(side: PrefillSide) -> None:
    side.granted(num_tokens=12)
    side.run_pass()
    side.all_pushes_end()
    batch = side.start_pass()  # tokens [6, 11)
    (push,) = side.armed_pages()
    assert push.source_pages.tolist() == list(batch.chunks[0].page_indices[1:])
    assert push.target_pages.tolist() == [21, 22]
    assert push.first_tick == ticks_per_pass(LAYOUT.num_layers)
    (tail,) = (push for push in side.fabric.armed.values() if isinstance(push, SingleWrite))
    assert tail.tick == 2 * ticks_per_pass(LAYOUT.num_layers)  # after the pass, when the hidden state is there
    assert tail.target_offset == 3 * TAIL_BYTES
    assert batch.chunks[0].tail_slot is not None
    assert tail.source_offset == batch.chunks[0].tail_slot * TAIL_BYTES
    assert tail.num_bytes == TAIL_BYTES


def test_arm_with_held_tokens_pushes_only_the_pages_after_them(side: PrefillSide) -> None:
    grant = side.grant(num_tokens=12, num_held_tokens=8)
    side.role.on_grant(DECODE, grant, now_ns=0)
    side.run_pass()
    assert not side.fabric.armed
    batch = side.start_pass()
    (push,) = side.armed_pages()
    assert push.source_pages.tolist() == [batch.chunks[0].page_indices[2]]
    assert push.target_pages.tolist() == [20]


def test_arm_of_a_chunk_inside_a_page_pushes_nothing(side: PrefillSide) -> None:
    side.granted(1, num_tokens=4)
    side.granted(2, num_tokens=9)  # gets the 3 tokens that the batch has left
    side.start_pass()
    assert {push.immediate for push in side.fabric.armed.values()} == {1 << 12}


# A drafter's cache

DRAFT_LAYOUT = KvLayout(num_layers=3, num_kv_heads=1, head_dim=2, page_slots=LAYOUT.page_slots, dtype="float32")
TICKS = ticks_per_pass(LAYOUT.num_layers + DRAFT_LAYOUT.num_layers)


def split(pushes: list[PagePush]) -> tuple[list[PagePush], list[PagePush]]:
    """Those of the model's KV, and those of the drafter's."""
    ours = [push for push in pushes if push.source != DRAFT_REGION]
    return ours, [push for push in pushes if push.source == DRAFT_REGION]


def test_arm_with_a_drafter_pushes_its_pages_after_the_layers_of_the_model() -> None:
    side = PrefillSide(draft_layout=DRAFT_LAYOUT)
    side.granted(num_tokens=12)
    batch = side.start_pass()  # tokens [0, 6)
    (ours,), (draft,) = split(side.armed_pages())
    assert (ours.first_tick, draft.first_tick) == (0, LAYOUT.num_layers)
    assert draft.source_pages.tolist() == [batch.chunks[0].page_indices[0]]
    assert (draft.num_layers, draft.run_bytes) == (DRAFT_LAYOUT.num_layers, DRAFT_LAYOUT.page_bytes)
    assert draft.target_layer_bytes == DRAFT_LAYOUT.layer_bytes(32)
    side.end_pass()
    side.all_pushes_end()
    side.start_pass()  # tokens [6, 11), and the tail after them
    (ours,), (draft,) = split(side.armed_pages())
    assert (ours.first_tick, draft.first_tick) == (TICKS, TICKS + LAYOUT.num_layers)
    assert draft.target_pages.tolist() == ours.target_pages.tolist() == [21, 22]
    (tail,) = (push for push in side.fabric.armed.values() if isinstance(push, SingleWrite))
    assert tail.tick == 2 * TICKS


def test_arm_of_a_chunk_that_ends_with_a_page_leaves_the_drafters_page_to_the_next_chunk() -> None:
    """A head computes the page's last slot from the token after it."""
    side = PrefillSide(draft_layout=DRAFT_LAYOUT)
    side.granted(1, num_tokens=3)
    side.granted(2, num_tokens=10)  # tokens [0, 4) and [4, 9)
    side.start_pass()
    of_second = [push for push in side.armed_pages() if push.immediate == 2 << 12]
    assert [push.source for push in of_second] != [DRAFT_REGION]
    assert len(of_second) == 1
    side.end_pass()
    side.all_pushes_end()
    side.start_pass()
    (ours,), (draft,) = split(side.armed_pages())
    assert ours.target_pages.tolist() == [21, 22]
    assert draft.target_pages.tolist() == [20, 21, 22]


def test_flush_covers_the_drafters_region() -> None:
    side = PrefillSide(draft_layout=DRAFT_LAYOUT)
    grant = side.granted()
    side.cancelled(grant)
    (targets,) = side.fabric.flushes.values()
    assert len(targets) == 3


def test_layers_of_the_drafter_are_counted_after_those_of_the_model_in_what_was_pushed() -> None:
    side = PrefillSide(draft_layout=DRAFT_LAYOUT)
    side.granted(num_tokens=3)
    side.run_pass()
    push_ids = list(side.fabric.armed)
    for push_id in push_ids:
        side.sender.on_push_ended(side.fabric.push_ends(push_id), now_ns=0)
    found = [(pushed.is_tail, pushed.first_layer, len(pushed.layers)) for pushed in side.sender.take_pushed()]
    assert found == [(False, 0, 2), (False, 2, 3), (True, 5, 1)]


# Several ranks

OTHER = Incarnation(5)
TWO_RANKS = KvSharding(layout=LAYOUT, num_ranks=2)
FOUR_RANKS = KvSharding(layout=LAYOUT, num_ranks=4)
"""Of 2 KV heads: two replica sets."""


@pytest.mark.parametrize("source", [TWO_RANKS, FOUR_RANKS])
@pytest.mark.parametrize("target", [TWO_RANKS, FOUR_RANKS])
def test_arm_between_shardings_pushes_the_same_pages_for_each_pair_of_ranks(
    source: KvSharding, target: KvSharding
) -> None:
    side = PrefillSide(sharding=source)
    side.join(OTHER, sharding=target)
    grant = side.granted(peer=OTHER)
    batch = side.start_pass()
    pairs = rank_pairs(source, target, handoff_id=grant.handoff_id)
    pushes = side.armed_pages()
    assert [push.source for push in pushes] == [pair.source_rank for pair in pairs]  # the side's regions are its ranks
    (regions,) = hello_of(OTHER, sharding=target).regions
    for push, pair in zip(pushes, pairs, strict=True):
        assert side.fabric.attached[push.target] == regions.kv[pair.target_rank]
        assert push.source_pages.tolist() == [batch.chunks[0].page_indices[0]]
        assert push.target_pages.tolist() == [20]
        assert (push.run_bytes, push.source_offset, push.target_offset) == (LAYOUT.head_bytes, 0, 0)
        assert push.immediate == grant.immediate


def test_arm_to_fewer_ranks_writes_the_heads_side_by_side() -> None:
    side = PrefillSide(sharding=TWO_RANKS)
    side.granted()  # the peer has one rank
    side.start_pass()
    first, second = side.armed_pages()
    assert (first.source_offset, first.target_offset) == (0, 0)
    assert (second.source_offset, second.target_offset) == (0, LAYOUT.head_bytes)
    assert second.source_page_bytes == TWO_RANKS.rank_layout.page_bytes
    assert second.target_page_bytes == LAYOUT.page_bytes
    assert second.source_layer_bytes == side.num_pages * TWO_RANKS.rank_layout.page_bytes
    assert second.target_layer_bytes == 32 * LAYOUT.page_bytes


def test_tail_goes_over_once_whatever_the_shardings() -> None:
    side = PrefillSide(sharding=FOUR_RANKS)
    side.join(OTHER, sharding=FOUR_RANKS)
    side.granted(num_tokens=4, peer=OTHER)
    side.start_pass()
    (tail,) = (push for push in side.fabric.armed.values() if isinstance(push, SingleWrite))
    assert tail.source == FOUR_RANKS.num_ranks  # behind the regions of its ranks
    (regions,) = hello_of(OTHER, sharding=FOUR_RANKS).regions
    assert side.fabric.attached[tail.target] == regions.tail


def test_grant_is_written_to_the_data_parallel_rank_that_it_names(side: PrefillSide) -> None:
    side.join(OTHER, num_dp_ranks=3)
    side.role.on_grant(OTHER, side.grant(num_tokens=4, peer=OTHER, dp_rank=2), now_ns=0)
    side.start_pass()
    regions = hello_of(OTHER, num_dp_ranks=3).regions[2]
    for push in side.fabric.armed.values():
        wanted = regions.kv[0] if isinstance(push, PagePush) else regions.tail
        assert side.fabric.attached[push.target] == wanted


def test_pages_are_kept_until_the_pushes_of_all_pairs_ended() -> None:
    side = PrefillSide(sharding=TWO_RANKS)
    side.granted(num_tokens=4)
    side.run_pass()
    *early, last = side.fabric.armed
    assert len(early) == 2
    for push_id in early:
        side.push_ends(push_id)
    assert side.role.num_open == 1
    assert side.pool.num_free < side.num_pages
    side.push_ends(last)
    assert side.is_whole()


@pytest.mark.parametrize("num_armable", range(4))
def test_push_that_can_not_be_armed_stops_those_of_the_other_pairs(num_armable: int) -> None:
    """The last chunk has two pushes of pages and the tail."""
    side = PrefillSide(sharding=TWO_RANKS)
    grant = side.granted(num_tokens=4)
    side.fabric.arm_error = CapacityError("too much is armed", retry_after_s=1.0)
    side.fabric.num_armable = num_armable
    side.run_pass()
    assert side.fabric.cancelled == (list(side.fabric.armed) if num_armable < 3 else [])
    assert len(side.fabric.armed) == num_armable
    side.all_pushes_end(PushOutcome.CANCELLED)
    if num_armable < 3:
        side.flush_ends()
    stopped = [message.handoff_id for _, message in side.sent if isinstance(message, HandoffStopped)]
    assert stopped == ([grant.handoff_id] if num_armable < 3 else [])
    assert side.is_whole()


def test_flush_covers_all_regions_of_all_data_parallel_ranks(side: PrefillSide) -> None:
    """A flush proves the delivery of what went to its targets, and the handoff may have written to any of them."""
    side.join(OTHER, sharding=TWO_RANKS, num_dp_ranks=2)
    side.cancelled(side.granted(peer=OTHER))
    (targets,) = side.fabric.flushes.values()
    flushed = [side.fabric.attached[target] for target in targets]
    assert flushed == exposures_of(hello_of(OTHER, sharding=TWO_RANKS, num_dp_ranks=2).regions)


# Confirmations


def test_flush_that_ends_after_its_peer_came_back_says_nothing_to_the_new_session(side: PrefillSide) -> None:
    grant = side.granted()
    side.cancelled(grant)
    side.lose()
    side.join(DECODE)
    side.flush_ends(delivered=False)
    assert side.dropped == []
    assert side.sent == []


def test_flush_of_a_handoff_that_never_was_is_confirmed_too(side: PrefillSide) -> None:
    message = Cancel(sender=DECODE, receiver=PREFILL, handoff_id=HandoffId(77))
    side.role.on_cancel(DECODE, message, now_ns=0)
    side.flush_ends()
    ((peer, stopped),) = side.sent
    assert isinstance(stopped, HandoffStopped)
    assert (peer, stopped.handoff_id) == (DECODE, 77)
