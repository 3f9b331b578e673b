"""A worker that drains: it takes nothing new, what it has goes on to its end, and it proves that all has landed."""

from tests.pure.prefill_side import DECODE, PrefillSide
from tests.pure.worker_side import WorkerSide

from pdserve.ids import Incarnation
from pdserve.wire.cluster import Failed, FailureKind, FinishReason, Generated
from pdserve.wire.peer import GrantRefused

OTHER = Incarnation(3)


def test_prefill_role_that_drains_refuses_grants_and_finishes_those_it_has() -> None:
    side = PrefillSide()
    side.granted(1)
    side.role.is_draining = True
    side.granted(2)
    ((peer, refusal),) = side.sent
    assert isinstance(refusal, GrantRefused)
    assert (peer, refusal.handoff_id, refusal.retry_after_s > 0) == (DECODE, 2, True)
    assert "drains" in refusal.message
    assert side.role.num_open == 1
    for _ in range(2):
        side.run_pass()
        side.all_pushes_end()
    assert side.is_whole()


def test_delivery_is_proved_by_a_flush_of_each_peer_which_is_told_nothing() -> None:
    side = PrefillSide()
    side.join(OTHER)
    side.sender.prove_delivery(now_ns=0)
    first, second = list(side.fabric.flushes)
    side.role.on_fabric_event(side.fabric.flush_ends(first), now_ns=0)
    assert side.sender.num_flushes == 1
    side.role.on_fabric_event(side.fabric.flush_ends(second, delivered=False), now_ns=0)
    assert side.sender.num_flushes == 0
    assert (side.sent, side.dropped) == ([], [])


def test_core_that_drains_refuses_requests_and_finishes_those_it_has() -> None:
    side = WorkerSide()
    side.generate("running", dp_rank=0, is_remote=False)
    side.core.drain()
    (refusal,) = side.generate("late", dp_rank=1)
    assert isinstance(refusal, Failed)
    assert (refusal.request_id, refusal.kind) == ("late", FailureKind.SHUTTING_DOWN)
    assert side.core.num_open == 1
    for letter in "abcd":
        side.run_pass(0, letter)
    *_, last = side.core.take_messages()
    assert isinstance(last, Generated)
    assert last.deltas[-1].finish_reason is FinishReason.LENGTH
    assert side.core.num_open == 0
    assert all(side.is_idle(dp_rank) for dp_rank in (0, 1))
