"""What the sender checks in a grant and arms for a chunk, and whose messages it obeys."""

import numpy as np
import pytest
from msgspec.structs import replace
from tests.pure.prefill_side import DECODE, LAYOUT, PREFILL, TAIL_BYTES, PrefillSide, hello_of, region

from pdserve.errors import InternalError, RemoteProtocolError
from pdserve.fabric.port import SingleWrite
from pdserve.ids import HandoffId, Incarnation, TailSlot
from pdserve.layer_counter import ticks_per_pass
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
        "2 pages do not fit 12 tokens": replace(good, page_indices=good.page_indices[:-1]),
        "4 pages do not fit 12 tokens": replace(good, page_indices=(*good.page_indices, 30)),
        "outside \\[0, 32\\)": replace(good, page_indices=(20, 21, 32)),
        "a page index is outside": replace(good, page_indices=(20, 21, -1)),
        "granted twice": replace(good, page_indices=(20, 21, 20)),
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


@pytest.mark.parametrize("missing", ["kv", "tail"])
def test_hello_without_a_region_is_a_protocol_error(side: PrefillSide, missing: str) -> None:
    regions = {"kv": region(8), "tail": region(9), missing: None}
    with pytest.raises(RemoteProtocolError, match="must offer its KV and tail regions"):
        side.sender.peer_joined(hello_of(Incarnation(4), kv=regions["kv"], tail=regions["tail"]))
    assert not side.sender.is_connected(Incarnation(4))


def test_hello_with_more_pages_than_its_region_holds_is_a_protocol_error(side: PrefillSide) -> None:
    hello = replace(hello_of(Incarnation(4), kv=region(8), tail=region(9)), num_pages=1 << 14)
    with pytest.raises(RemoteProtocolError, match="do not fit the offered"):
        side.sender.peer_joined(hello)


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
