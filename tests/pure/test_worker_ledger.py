"""The ledger of a worker: in every state of a request it names who holds what, and the audit finds nothing wrong."""

import pytest
from msgspec.structs import replace
from tests.pure.decode_side import PREFILL
from tests.pure.ledger_side import NOW_NS, Granting, end_pass, num_pages, owners, rank_ledger, start_pass
from tests.pure.worker_side import WorkerSide, generate_of

from pdserve.config.speculation import Drafter, Speculation
from pdserve.fabric.port import PushOutcome
from pdserve.ids import RequestId
from pdserve.units import NS_PER_S
from pdserve.worker.ledger import OwnerEntry, SessionEntry, ledger_of, log_lines, page_ranges


@pytest.fixture
def worker() -> WorkerSide:
    return WorkerSide()


# On a decode worker


def test_ledger_of_an_idle_worker_has_sessions_and_free_pages_only(worker: WorkerSide) -> None:
    ledger = ledger_of(worker.core, now_ns=NOW_NS, connected_since_ns={PREFILL: NOW_NS - 2 * NS_PER_S})
    assert ledger.sessions == (
        SessionEntry(peer="prefill", incarnation=str(PREFILL), phase="connected", age_s=2.0, num_handoffs=0),
    )
    assert [(rank.dp_rank, rank.num_free_pages, rank.owners) for rank in ledger.ranks] == [(0, 16, ()), (1, 16, ())]
    assert ledger.leaks == ()


def test_ledger_of_a_request_without_room_shows_it_pending_without_pages(worker: WorkerSide) -> None:
    for name in ("first", "second"):
        worker.generate(name, dp_rank=1, num_tokens=50)
    assert owners(worker, 1)["request second"] == OwnerEntry(owner="request second", phase="pending", age_s=3.0)
    assert owners(worker, 0) == {}


def test_ledger_of_a_handoff_shows_its_pages_tail_slot_and_immediate(worker: WorkerSide) -> None:
    worker.generate("request", dp_rank=1, num_tokens=9)
    (grant,) = worker.grants()
    entries = owners(worker, 1)
    assert entries["request request"].phase == "handoff"
    assert entries["handoff 1 of request request"] == OwnerEntry(
        owner="handoff 1 of request request",
        phase="granted",
        age_s=3.0,
        pages=page_ranges(grant.page_indices),
        tail_slot=grant.tail_slot,
        immediate=grant.immediate,
    )


def test_ledger_between_landing_and_taking_shows_pages_landed(worker: WorkerSide) -> None:
    worker.generate("request", dp_rank=0)
    (grant,) = worker.grants()
    assert worker.core.receiver is not None
    worker.core.receiver.on_fabric_event(worker.fabric.all_land(grant.immediate), now_ns=0)
    entry = owners(worker)["handoff 1 of request request"]
    assert (entry.phase, num_pages(entry), entry.tail_slot, entry.immediate) == ("landed", 2, grant.tail_slot, None)


def test_ledger_of_a_landed_request_shows_its_choice_scheduled(worker: WorkerSide) -> None:
    worker.generate("request", dp_rank=0)
    worker.lands(worker.grants()[0])
    entries = owners(worker)
    assert entries["request request"].phase == "scheduled"
    choice = entries["choice 0 of request request"]
    assert (choice.phase, choice.place, choice.age_s, num_pages(choice)) == ("scheduled", "handed_over", 3.0, 2)
    start_pass(worker)
    assert owners(worker)["choice 0 of request request"].place == "running"


def test_ledger_of_a_preempted_choice_shows_it_without_pages() -> None:
    worker = WorkerSide(num_pages=5, num_dp_ranks=1)
    worker.generate("old", dp_rank=0, num_tokens=7, is_remote=False)
    worker.generate("young", dp_rank=0, num_tokens=8, is_remote=False)
    worker.run_pass(0, "a")
    worker.run_pass(0, "a")
    assert [num_pages(entry) for entry in owners(worker).values() if entry.place == "running"] == [2, 3]
    start_pass(worker)
    entries = owners(worker)
    old, young = entries["choice 0 of request old"], entries["choice 0 of request young"]
    assert (old.place, num_pages(old)) == ("running", 3)
    assert (young.phase, young.place, num_pages(young)) == ("scheduled", "preempted", 0)


def test_ledger_of_a_cancelled_handoff_keeps_its_pages_until_the_peer_confirms(worker: WorkerSide) -> None:
    worker.generate("request", dp_rank=0)
    worker.core.on_abort(RequestId("request"), now_ns=0)
    entries = owners(worker)
    assert list(entries) == ["handoff 1 of request request"]
    entry = entries["handoff 1 of request request"]
    assert (entry.phase, num_pages(entry), entry.tail_slot is not None) == ("cancelling", 2, True)


def test_ledger_after_the_loss_of_a_peer_shows_the_quarantine_and_the_fence(worker: WorkerSide) -> None:
    worker.generate("request", dp_rank=0)
    worker.core.peer_lost(PREFILL, now_ns=0)
    (session,) = ledger_of(worker.core, now_ns=NOW_NS).sessions
    assert (session.phase, session.num_handoffs) == ("fencing", 1)
    entries = owners(worker)
    assert (entries["handoff 1 of request request"].phase, entries["request request"].phase) == (
        "quarantined",
        "scheduled",
    )
    assert entries["choice 0 of request request"].place == "waiting"


def test_ledger_of_a_request_aborted_in_a_pass_keeps_pages_and_tail_to_its_end() -> None:
    worker = WorkerSide(speculation=Speculation(drafter=Drafter.MTP))
    worker.generate("request", dp_rank=0)
    (grant,) = worker.grants()
    worker.lands(grant)
    batch = start_pass(worker)
    worker.core.on_abort(RequestId("request"), now_ns=0)
    entries = owners(worker)
    assert (entries["request request"].phase, entries["request request"].tail_slot) == ("ended", grant.tail_slot)
    choice = entries["choice 0 of request request"]
    assert (choice.phase, choice.place, num_pages(choice) > 0) == ("done", "removing", True)
    end_pass(worker, batch)
    assert owners(worker) == {}


def test_ledger_of_forks_shows_each_shared_page_once_with_all_its_owners(worker: WorkerSide) -> None:
    generate = replace(generate_of(tuple(range(10))), num_choices=3)
    worker.core.on_generate(generate, now_ns=0)
    (grant,) = worker.grants()
    worker.lands(grant)
    first, second, third = grant.page_indices
    choices = tuple(f"choice {index} of request request" for index in range(3))
    rank = rank_ledger(worker)
    assert [entry.phase for entry in rank.owners if entry.owner.startswith("copy")] == ["waiting"] * 2
    by_pages = {shared.pages: shared.owners for shared in rank.shared}
    assert by_pages.keys() == {page_ranges([first, second]), page_ranges([third])}
    assert set(by_pages[page_ranges([first, second])]) == set(choices)
    copied = by_pages[page_ranges([third])]
    assert copied[0] == choices[0] and all(owner.startswith("copy to page") for owner in copied[1:])
    own = {entry.owner: num_pages(entry) for entry in rank.owners}
    assert [own[choice] for choice in choices] == [0, 1, 1]
    batch = start_pass(worker)
    assert [entry.phase for entry in rank_ledger(worker).owners if entry.owner.startswith("copy")] == ["running"] * 2
    end_pass(worker, batch)
    assert not any(entry.owner.startswith("copy") for entry in rank_ledger(worker).owners)


# On a prefill worker


@pytest.fixture
def granting() -> Granting:
    return Granting()


def test_ledger_of_a_granted_prompt_goes_from_queued_over_pushing_to_held(granting: Granting) -> None:
    granting.grants(num_tokens=70)
    assert (granting.entry.phase, granting.entry.place, num_pages(granting.entry)) == ("queued", "waiting", 0)
    batch = start_pass(granting.worker)
    assert (granting.entry.phase, granting.entry.place, num_pages(granting.entry)) == ("pushing", "running", 18)
    end_pass(granting.worker, batch)
    batch = start_pass(granting.worker)
    assert (granting.entry.phase, granting.entry.place) == ("sealed", "running")
    end_pass(granting.worker, batch)
    assert (granting.entry.phase, granting.entry.place, num_pages(granting.entry)) == ("sealed", None, 18)
    granting.pushes_end()
    assert owners(granting.worker) == {}


def test_ledger_of_a_handoff_cancelled_in_a_pass_keeps_its_pages_until_the_flush(granting: Granting) -> None:
    granting.grants(num_tokens=12)
    batch = start_pass(granting.worker)
    granting.cancels()
    assert (granting.entry.phase, granting.entry.place) == ("stopping", "removing")
    end_pass(granting.worker, batch)
    assert (granting.entry.phase, granting.entry.place, num_pages(granting.entry)) == ("stopping", None, 3)
    granting.pushes_end(PushOutcome.CANCELLED)
    assert (granting.entry.phase, num_pages(granting.entry)) == ("flushing", 3)


def test_ledger_of_a_handoff_of_a_lost_peer_keeps_its_pages_until_the_pushes_end(granting: Granting) -> None:
    granting.grants(num_tokens=12)
    end_pass(granting.worker, start_pass(granting.worker))
    granting.worker.core.peer_lost(PREFILL, now_ns=0)
    assert ledger_of(granting.worker.core, now_ns=NOW_NS).sessions == ()
    assert (granting.entry.phase, granting.entry.place, num_pages(granting.entry)) == ("abandoned", None, 3)
    granting.pushes_end(PushOutcome.CANCELLED)
    assert owners(granting.worker) == {}


# As text


def test_log_lines_of_a_ledger_name_every_owner_on_one_line(worker: WorkerSide) -> None:
    worker.generate("request", dp_rank=0)
    connected_since_ns = {PREFILL: NOW_NS - 2 * NS_PER_S}
    lines = list(log_lines(ledger_of(worker.core, now_ns=NOW_NS, connected_since_ns=connected_since_ns)))
    assert lines == [
        f"ledger_session peer=prefill incarnation={PREFILL} phase=connected age_s=2.000 num_handoffs=1",
        "ledger_rank dp_rank=0 num_free_pages=14 num_pages=16 num_owners=2",
        "ledger_owner dp_rank=0 owner='request request' phase=handoff age_s=3.000",
        "ledger_owner dp_rank=0 owner='handoff 1 of request request' phase=granted age_s=3.000 pages=[0,2) "
        "tail_slot=0 immediate=0x0",
        "ledger_rank dp_rank=1 num_free_pages=16 num_pages=16 num_owners=0",
    ]


def test_page_ranges_of_scattered_pages_are_half_open_and_fewest() -> None:
    assert page_ranges([7, 1, 0, 2, 2]) == ((0, 3), (7, 8))
    assert page_ranges([]) == ()
