"""The decode role: where a prompt is prefilled, when a request ends, and who holds its pages until then."""

import pytest
from tests.pure.decode_role_side import ABSENT_TARGET, PREFILL_TARGET, DecodeRoleSide
from tests.pure.decode_side import PREFILL, DecodeSide

from pdserve.decode.request import HandoffOutcome, LocalReason
from pdserve.ids import RequestId
from pdserve.sampling import SamplingParams
from pdserve.telemetry.instants import Instant
from pdserve.transfer.limits import ReceiverLimits
from pdserve.units import NS_PER_S
from pdserve.wire.cluster import FailureKind, PrefillPlace, PrefillTarget


@pytest.fixture
def worker() -> DecodeRoleSide:
    return DecodeRoleSide()


def local_reason(worker: DecodeRoleSide) -> LocalReason | None:
    """Of the only request that ended."""
    (request,) = worker.role.take_ended()
    return request.local_reason


# Where the prompt is prefilled


def test_request_with_a_prefill_worker_is_not_schedulable_before_it_landed(worker: DecodeRoleSide) -> None:
    worker.generate()
    assert worker.scheduler.next_batch(0) is None
    (grant,) = worker.grants()
    worker.land(grant)
    batch = worker.scheduler.next_batch(0)
    assert batch is not None
    (chunk,) = batch.chunks
    assert (chunk.start, chunk.token_ids, chunk.samples) == (7, (7,), True)  # the last prompt token, here


def test_remote_prefill_is_reported_with_the_first_delta(worker: DecodeRoleSide) -> None:
    request_id = worker.generate()
    worker.land(worker.grants()[0])
    worker.sample("abcd")
    assert worker.places == {request_id: PrefillPlace.REMOTE}
    assert local_reason(worker) is None
    assert worker.is_idle()


@pytest.mark.parametrize(
    ("target", "num_tokens", "reason"),
    [
        (None, 8, LocalReason.ROUTED),
        (PREFILL_TARGET, 1, LocalReason.ROUTED),
        (ABSENT_TARGET, 8, LocalReason.NO_PREFILL_WORKER),
    ],
)
def test_request_without_a_usable_prefill_worker_is_prefilled_locally(
    worker: DecodeRoleSide, target: PrefillTarget | None, num_tokens: int, reason: LocalReason
) -> None:
    request_id = worker.generate(prefill=target, num_tokens=num_tokens)
    assert worker.grants() == []
    worker.sample("abcd")
    assert worker.places == {request_id: PrefillPlace.LOCAL}
    assert local_reason(worker) is reason
    assert worker.is_idle()


def test_quarantine_over_its_bound_leads_to_local_prefill() -> None:
    worker = DecodeRoleSide(DecodeSide(limits=ReceiverLimits(max_quarantined_share=0.1)))
    aborted = worker.generate("aborted")
    worker.role.on_abort(aborted, now_ns=0)
    worker.role.take_ended()
    worker.generate("local")
    assert len(worker.grants()) == 1
    worker.sample("abcd")
    assert local_reason(worker) is LocalReason.QUARANTINE


def test_refused_grant_leads_to_local_prefill(worker: DecodeRoleSide) -> None:
    worker.generate()
    worker.side.refused(worker.grants()[0])
    worker.advance()
    worker.sample("abcd")
    assert local_reason(worker) is LocalReason.REFUSED
    assert worker.is_idle()


def test_stopped_handoff_leads_to_local_prefill(worker: DecodeRoleSide) -> None:
    worker.generate()
    worker.side.stopped(worker.grants()[0])
    worker.advance()
    worker.sample("abcd")
    assert local_reason(worker) is LocalReason.HANDOFF_FAILED


def test_lost_prefill_worker_leads_to_local_prefill_on_other_pages(worker: DecodeRoleSide) -> None:
    worker.generate()
    (grant,) = worker.grants()
    worker.side.receiver.peer_lost(PREFILL)
    worker.advance()
    worker.start_pass()
    assert worker.running is not None
    assert not set(worker.running.chunks[0].page_indices) & set(grant.page_indices)
    worker.end_pass(0)
    worker.sample("bcd")
    assert local_reason(worker) is LocalReason.HANDOFF_FAILED
    assert not worker.is_idle()  # the granted pages wait for the fence
    worker.side.is_fenced(PREFILL)
    assert worker.is_idle()


def test_request_waits_for_pages_and_starts_when_they_come_back(worker: DecodeRoleSide) -> None:
    worker.generate("first", num_tokens=36)
    worker.generate("second", num_tokens=36)
    assert len(worker.grants()) == 1
    assert worker.role.num_pending_tokens == 36
    worker.role.on_abort(RequestId("first"), now_ns=0)
    worker.side.stopped(worker.grants()[0])
    worker.advance()
    assert [grant.request_id for grant in worker.grants()] == ["first", "second"]
    assert worker.role.num_pending == 0


def test_handoff_does_not_take_the_pages_that_a_waiting_local_prompt_needs(worker: DecodeRoleSide) -> None:
    """Else a stream of short handoffs could starve a prompt that fell back to local prefill, or a preempted answer."""
    worker.generate("first", num_tokens=36)  # 9 of 16 pages
    worker.generate("local", num_tokens=36, prefill=None)
    worker.generate("short", num_tokens=8)
    assert [grant.request_id for grant in worker.grants()] == ["first"]
    worker.role.on_abort(RequestId("first"), now_ns=0)
    worker.side.stopped(worker.grants()[0])
    worker.advance()
    worker.start_pass()
    worker.end_pass(0)
    assert [grant.request_id for grant in worker.grants()] == ["first", "short"]


@pytest.mark.parametrize("outcome", [None, *HandoffOutcome])
def test_outcome_of_a_handoff_is_known_when_the_request_ended(
    worker: DecodeRoleSide, outcome: HandoffOutcome | None
) -> None:
    request_id = worker.generate(prefill=None if outcome is None else PREFILL_TARGET)
    match outcome:
        case HandoffOutcome.LANDED:
            worker.side.all_land(worker.grants()[0])
        case HandoffOutcome.REFUSED:
            worker.side.refused(worker.grants()[0])
        case HandoffOutcome.FAILED:
            worker.side.stopped(worker.grants()[0])
        case HandoffOutcome.CANCELLED:
            worker.role.on_abort(request_id, now_ns=0)
        case None:
            pass
    worker.advance()
    if outcome is not HandoffOutcome.CANCELLED:
        worker.sample("abcd")
    (request,) = worker.role.take_ended()
    assert request.handoff_outcome is outcome


def test_request_that_waits_for_pages_starts_with_the_pass_that_frees_them(worker: DecodeRoleSide) -> None:
    worker.generate("first", num_tokens=36)
    worker.generate("second", num_tokens=36)
    worker.land(worker.grants()[0])
    worker.sample("abcd")
    assert [grant.request_id for grant in worker.grants()] == ["first", "second"]
    (first,) = worker.role.take_ended()
    assert {Instant.LANDED, Instant.SCHEDULED, Instant.FIRST_TOKEN, Instant.FINISHED} < set(first.instants.times_ns)


# Aborts, deadlines and failures


def test_abort_while_pending_leaves_nothing(worker: DecodeRoleSide) -> None:
    worker.generate("first", num_tokens=36)
    pending = worker.generate("second", num_tokens=36)
    worker.role.on_abort(pending, now_ns=0)
    assert worker.role.num_pending == 0
    assert worker.role.num_open == 1


def test_abort_while_handed_over_cancels_and_keeps_pages_until_confirmed(worker: DecodeRoleSide) -> None:
    request_id = worker.generate()
    (grant,) = worker.grants()
    worker.role.on_abort(request_id, now_ns=0)
    assert worker.side.cancels() == [grant.handoff_id]
    assert worker.role.num_open == 0
    assert not worker.is_idle()
    worker.side.stopped(grant)
    worker.advance()
    assert worker.is_idle()
    assert worker.failed == []


def test_abort_between_landing_and_its_report_releases_the_pages(worker: DecodeRoleSide) -> None:
    request_id = worker.generate()
    worker.side.all_land(worker.grants()[0])
    worker.role.on_abort(request_id, now_ns=0)
    worker.advance()
    assert worker.is_idle()


def test_abort_during_a_pass_releases_the_pages_after_it(worker: DecodeRoleSide) -> None:
    request_id = worker.generate()
    worker.land(worker.grants()[0])
    worker.start_pass()
    worker.role.on_abort(request_id, now_ns=0)
    assert not worker.side.is_whole()
    worker.end_pass(0)
    assert worker.is_idle()
    assert worker.texts == {}


def test_abort_of_an_unknown_request_changes_nothing(worker: DecodeRoleSide) -> None:
    worker.role.on_abort(RequestId("never was"), now_ns=0)
    assert worker.is_idle()


def test_deadline_during_a_handoff_fails_the_request_and_cancels(worker: DecodeRoleSide) -> None:
    worker.generate(timeout_s=2.0)
    (grant,) = worker.grants()
    worker.role.on_time(2 * NS_PER_S - 1)
    assert worker.role.num_open == 1
    worker.role.on_time(2 * NS_PER_S)
    worker.listen()
    assert worker.failures() == [FailureKind.TIMEOUT]
    assert worker.side.cancels() == [grant.handoff_id]
    worker.side.stopped(grant)
    assert worker.is_idle()


def test_deadline_during_generation_fails_the_request_and_frees_its_pages(worker: DecodeRoleSide) -> None:
    worker.generate(timeout_s=2.0)
    worker.land(worker.grants()[0])
    worker.sample("a")
    worker.role.on_time(2 * NS_PER_S)
    worker.listen()
    assert worker.failures() == [FailureKind.TIMEOUT]
    assert worker.is_idle()


def test_expired_handoff_before_the_deadline_was_seen_ends_once(worker: DecodeRoleSide) -> None:
    worker.generate(timeout_s=2.0)
    (grant,) = worker.grants()
    worker.side.expires(grant)
    worker.advance()
    worker.role.on_time(2 * NS_PER_S)
    worker.listen()
    assert worker.failures() == [FailureKind.TIMEOUT]
    assert len(worker.role.take_ended()) == 1
    worker.side.stopped(grant)
    assert worker.is_idle()


@pytest.mark.parametrize(
    ("num_tokens", "max_tokens", "message"),
    [(0, 4, "no tokens"), (37, 4, "over the context of 40")],
)
def test_impossible_request_is_refused_before_pages_are_taken(
    worker: DecodeRoleSide, num_tokens: int, max_tokens: int, message: str
) -> None:
    worker.generate(num_tokens=num_tokens, sampling=SamplingParams(max_tokens=max_tokens))
    (failed,) = worker.failed
    assert failed.kind is FailureKind.INVALID
    assert message in failed.message
    assert worker.is_idle()


def test_request_longer_than_the_pool_is_refused() -> None:
    worker = DecodeRoleSide(DecodeSide(num_pages=4))
    worker.generate(num_tokens=16)
    assert worker.failures() == [FailureKind.INVALID]
    assert "lower max_tokens" in worker.failed[0].message


def test_request_over_the_bound_is_refused_with_a_time_to_come_back() -> None:
    worker = DecodeRoleSide(max_requests=1)
    worker.generate("first")
    worker.generate("second")
    (failed,) = worker.failed
    assert (failed.request_id, failed.kind) == ("second", FailureKind.CAPACITY)
    assert failed.retry_after_s is not None


@pytest.mark.parametrize("phase", ["handoff", "pass", "between"])
def test_worker_that_stops_fails_every_request_once(worker: DecodeRoleSide, phase: str) -> None:
    worker.generate()
    (grant,) = worker.grants()
    if phase != "handoff":
        worker.land(grant)
    if phase == "pass":
        worker.start_pass()
    worker.role.fail_all(FailureKind.SHUTTING_DOWN, "the worker stops", now_ns=0)
    worker.listen()
    assert worker.failures() == [FailureKind.SHUTTING_DOWN]
    if phase == "handoff":
        worker.side.stopped(grant)
    if phase == "pass":
        worker.end_pass(0)
    assert worker.is_idle()


def test_lost_gateway_aborts_every_request_silently(worker: DecodeRoleSide) -> None:
    worker.generate("first")
    worker.generate("second", prefill=None)
    worker.role.abort_all(now_ns=0)
    worker.side.stopped(worker.grants()[0])
    worker.advance()
    assert worker.failed == []
    assert worker.is_idle()
    assert len(worker.role.take_ended()) == 2
