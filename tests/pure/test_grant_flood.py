"""A flood of grants: what a prefill worker holds is bounded by its tail slots, and each of the rest is told to wait."""

from collections import Counter

from tests.pure.prefill_side import DECODE, PrefillSide

from pdserve.ids import Incarnation
from pdserve.wire.peer import GrantRefused

PEERS = (DECODE, Incarnation(98), Incarnation(99))
NUM_GRANTS = 1000
"""Of each peer; a worker that is well holds a few."""


def test_flood_of_grants_holds_a_bounded_number_and_refuses_the_rest_with_a_time_to_come_back() -> None:
    side = PrefillSide(num_tail_slots=4, max_waiting=8)
    for peer in PEERS[1:]:
        side.join(peer)
    for number in range(NUM_GRANTS):
        for peer in PEERS:
            side.granted(number + 1, peer=peer)
            assert side.role.num_open == side.sender.num_open == len(side.role.used_tail_slots) <= side.num_tail_slots
    refusals = [(peer, message) for peer, message in side.sent if isinstance(message, GrantRefused)]
    assert len(refusals) == len(side.sent) == len(PEERS) * NUM_GRANTS - side.num_tail_slots == side.role.num_refused
    assert all(refusal.retry_after_s > 0 for _, refusal in refusals)
    assert min(Counter(peer for peer, _ in refusals).values()) >= NUM_GRANTS - side.num_tail_slots
    for peer in PEERS:
        side.lose(peer)
    assert side.role.num_open == 0
    assert side.is_whole()
