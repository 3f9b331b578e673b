"""The audit of a worker finds a planted leak of every kind, says what it is, and counts and logs it once."""

# pyright: reportPrivateUsage=false

import asyncio
import logging
from contextlib import suppress

import pytest
from tests.pure.decode_side import PREFILL
from tests.pure.ledger_side import Granting, start_pass
from tests.pure.worker_side import WorkerSide

from pdserve.clock import VirtualClock
from pdserve.ids import HandoffId, PageIndex, RequestId, SequenceId
from pdserve.sampling import SamplingParams
from pdserve.schedule.sequence import Sequence
from pdserve.telemetry.worker_metrics import WorkerMetrics
from pdserve.transfer.receiver import Receiver
from pdserve.worker.audit import LeakKind, audit
from pdserve.worker.auditor import MAX_LOGGED, Auditor
from pdserve.worker.core import WorkerCore

Found = dict[tuple[LeakKind, int | None, int | str], str]
"""The message of each leak, by kind, data parallel rank and subject."""


@pytest.fixture
def worker() -> WorkerSide:
    """With a request in handoff on rank 0 and one that is scheduled on rank 1."""
    worker = WorkerSide()
    worker.generate("moving", dp_rank=0)
    worker.generate("running", dp_rank=1, is_remote=False)
    worker.core.ranks[1].next_batch(now_ns=0)
    assert found(worker.core) == {}
    return worker


def found(core: WorkerCore) -> Found:
    leaks = audit(core)
    by_subject = {(leak.kind, leak.dp_rank, leak.subject): leak.message for leak in leaks}
    assert len(by_subject) == len(leaks)
    return by_subject


def receiver_of(worker: WorkerSide) -> Receiver:
    assert worker.core.receiver is not None
    return worker.core.receiver


# Pages


def test_audit_of_pages_that_nobody_released_names_each(worker: WorkerSide) -> None:
    first, second = worker.core.ranks[1].pool.allocate(2)
    assert found(worker.core) == {
        (LeakKind.PAGES, 1, page): f"owners of page {page}: 1 by the pool, 0 known" for page in (first, second)
    }


def test_audit_of_a_share_that_nobody_released_names_the_page(worker: WorkerSide) -> None:
    (grant,) = worker.grants()
    page = PageIndex(grant.page_indices[0])
    worker.core.ranks[0].pool.share([page])
    assert found(worker.core) == {(LeakKind.PAGES, 0, page): f"owners of page {page}: 2 by the pool, 1 known"}


def test_audit_of_a_page_freed_while_its_handoff_is_open_names_it(worker: WorkerSide) -> None:
    page = PageIndex(worker.grants()[0].page_indices[1])
    worker.core.ranks[0].pool.release([page])
    assert found(worker.core) == {(LeakKind.PAGES, 0, page): f"owners of page {page}: 0 by the pool, 1 known"}


def test_audit_of_a_page_lost_from_the_free_ones_says_so(worker: WorkerSide) -> None:
    worker.core.ranks[0].pool._free_stack.pop()
    assert found(worker.core) == {(LeakKind.PAGES, 0, "free"): "pages without owner: 14, but 13 are free"}


# Slots


def test_audit_of_a_tail_slot_that_nobody_released_names_it(worker: WorkerSide) -> None:
    slot = receiver_of(worker)._destinations[0]._tail_slots.allocate()
    assert found(worker.core) == {(LeakKind.TAIL_SLOTS, 0, slot): f"tail slot {slot} is in use, owners known: 0"}


def test_audit_of_a_tail_slot_freed_while_its_handoff_is_open_names_it(worker: WorkerSide) -> None:
    slot = worker.grants()[0].tail_slot
    receiver_of(worker).release_tail_slot(0, slot)
    assert found(worker.core) == {(LeakKind.TAIL_SLOTS, 0, slot): f"tail slot {slot} is free, owners known: 1"}


def test_audit_of_an_immediate_that_nobody_released_names_it(worker: WorkerSide) -> None:
    immediate = receiver_of(worker)._immediates.allocate()
    message = f"immediate {immediate} is in use, owners known: 0"
    assert found(worker.core) == {(LeakKind.IMMEDIATES, None, immediate): message}


def test_audit_of_an_immediate_given_back_while_its_handoff_is_open_names_it(worker: WorkerSide) -> None:
    immediate = worker.grants()[0].immediate
    receiver_of(worker)._immediates.release(immediate)
    message = f"immediate {immediate} is free, owners known: 1"
    assert found(worker.core) == {(LeakKind.IMMEDIATES, None, immediate): message}


def test_audit_of_a_tail_slot_lost_on_the_prefill_side_names_it() -> None:
    granting = Granting()
    granting.grants(num_tokens=12)
    assert granting.worker.core.prefill is not None
    slot = granting.worker.core.prefill._tail_slots.allocate()
    message = f"tail slot {slot} is in use, owners known: 0"
    assert found(granting.worker.core) == {(LeakKind.TAIL_SLOTS, 0, slot): message}


# Sequences


def test_audit_of_a_scheduled_sequence_without_request_names_it(worker: WorkerSide) -> None:
    stray = Sequence(
        sequence_id=SequenceId(77),
        token_ids=[1, 2],
        num_prompt_tokens=2,
        arrival_ns=0,
        sampling=SamplingParams(max_tokens=1),
    )
    worker.core.ranks[0].scheduler.add(stray)
    message = "sequence 77 is scheduled, and nobody waits for it"
    assert found(worker.core) == {(LeakKind.SEQUENCES, 0, 77): message}


def test_audit_of_a_choice_whose_sequence_was_dropped_names_it_and_its_pages(worker: WorkerSide) -> None:
    rank = worker.core.ranks[1]
    (placed,) = rank.scheduler.placed
    del rank.scheduler._running[placed.sequence.sequence_id]
    leaks = found(worker.core)
    message = "choice 0 of request running waits for a sequence that is not scheduled"
    assert leaks[LeakKind.SEQUENCES, 1, placed.sequence.sequence_id] == message
    assert leaks.keys() - {(LeakKind.SEQUENCES, 1, placed.sequence.sequence_id)} == {
        (LeakKind.PAGES, 1, page) for page in placed.sequence.page_indices
    }


def test_audit_of_a_request_whose_handoff_is_gone_names_its_choice(worker: WorkerSide) -> None:
    decode = worker.core.ranks[0].decode
    assert decode is not None
    ((sequence_id, (request, _)),) = decode.owners.items()
    request.handoff_id = HandoffId(99)
    message = "choice 0 of request moving waits for a handoff that is closed"
    assert found(worker.core) == {(LeakKind.SEQUENCES, 0, sequence_id): message}


def test_audit_of_a_handoff_without_sequence_names_it() -> None:
    granting = Granting()
    granting.grants(num_tokens=12)
    core = granting.worker.core
    assert core.prefill is not None and core.sender is not None
    ((key, _),) = core.prefill.sequence_ids.items()
    core.sender.discard(key)
    subject = f"handoff 7 of peer {PREFILL}"
    message = f"the prefill role has {subject}, the sender does not"
    leaks = found(core)
    assert leaks[LeakKind.SEQUENCES, 0, subject] == message


def test_audit_in_the_middle_of_a_pass_finds_nothing() -> None:
    granting = Granting()
    granting.grants(num_tokens=12)
    start_pass(granting.worker)
    granting.cancels()
    assert found(granting.worker.core) == {}


# Counted and logged


def gauges(metrics: WorkerMetrics) -> dict[str, float]:
    return {
        sample.labels["kind"]: sample.value
        for family in metrics.registry.collect()
        for sample in family.samples
        if sample.name == "pdserve:ledger_leaked"
    }


def test_auditor_counts_leaks_by_kind_and_logs_each_once(caplog: pytest.LogCaptureFixture) -> None:
    worker, metrics = WorkerSide(), WorkerMetrics(model_name="toy")
    auditor = Auditor(core=worker.core, clock=VirtualClock(), metrics=metrics)
    nothing = dict.fromkeys(("pages", "tail_slots", "immediates", "sequences"), 0.0)
    assert gauges(metrics) == nothing
    leaked = worker.core.ranks[0].pool.allocate(2)
    with caplog.at_level(logging.ERROR):
        auditor.audit()
        ledger = auditor.ledger()
    assert gauges(metrics) == {**nothing, "pages": 2.0}
    assert [leak.message for leak in ledger.leaks] == [
        f"owners of page {page}: 1 by the pool, 0 known" for page in leaked
    ]
    assert [record.getMessage() for record in caplog.records] == [
        f"ledger_leaked kind=pages dp_rank=0 what='owners of page {page}: 1 by the pool, 0 known'" for page in leaked
    ]
    worker.core.ranks[0].pool.release(leaked)
    auditor.audit()
    assert gauges(metrics) == nothing


def test_auditor_logs_so_many_leaks_of_one_audit_and_the_number_of_the_rest(caplog: pytest.LogCaptureFixture) -> None:
    worker = WorkerSide(num_pages=MAX_LOGGED + 5)
    worker.core.ranks[0].pool.allocate(MAX_LOGGED + 3)
    with caplog.at_level(logging.ERROR):
        Auditor(core=worker.core, clock=VirtualClock(), metrics=WorkerMetrics(model_name="toy")).audit()
    messages = [record.getMessage() for record in caplog.records]
    assert (len(messages), messages[-1]) == (MAX_LOGGED + 1, "ledger_leaked num_more=3")


async def test_auditor_that_runs_looks_at_an_idle_worker_and_not_at_a_busy_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdserve.worker.auditor.AUDIT_EVERY_S", 0.0)
    worker, metrics = WorkerSide(), WorkerMetrics(model_name="toy")
    worker.generate("request", dp_rank=0, is_remote=False)
    worker.core.ranks[1].pool.allocate(3)
    running = asyncio.create_task(Auditor(core=worker.core, clock=VirtualClock(), metrics=metrics).run())
    await some_turns()
    assert gauges(metrics)["pages"] == 0.0
    worker.core.on_abort(RequestId("request"), now_ns=0)
    await some_turns()
    assert gauges(metrics)["pages"] == 3.0
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running


async def some_turns() -> None:
    """Of the event loop: several audits' worth."""
    for _ in range(10):
        await asyncio.sleep(0)


def test_auditor_dump_logs_the_ledger_where_the_default_level_shows_it(caplog: pytest.LogCaptureFixture) -> None:
    worker = WorkerSide(num_dp_ranks=1)
    worker.generate("request", dp_rank=0)
    auditor = Auditor(core=worker.core, clock=VirtualClock(), metrics=WorkerMetrics(model_name="toy"))
    with caplog.at_level(logging.WARNING):
        auditor.dump()
    events = [record.getMessage().split()[0] for record in caplog.records]
    assert events == ["ledger_session", "ledger_rank", "ledger_owner", "ledger_owner"]
