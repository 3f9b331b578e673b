"""The dispatcher: where a request is sent, and what happens when a worker refuses it or is lost."""

import pytest
from tests.pure.dispatcher_side import MAX_PENDING, cluster_of, delta_of, failed_of, join_of, sent, work_of

from pdserve.cluster.registry import Refused, Registry
from pdserve.config.role import Role
from pdserve.gateway.dispatcher import MAX_RETRIES, Action, Dispatcher, Fail, Send
from pdserve.gateway.failures import RequestFailed
from pdserve.ids import Incarnation, WorkerId
from pdserve.sampling import TokenLogprobs
from pdserve.units import NS_PER_S
from pdserve.wire.cluster import (
    MAX_TOLD_TOKENS,
    Abort,
    Delta,
    FailureKind,
    Generate,
    Generated,
    Load,
    TokenEntry,
    Told,
    WorkerHeartbeat,
)


def test_submit_gives_the_worker_what_is_left_of_the_time() -> None:
    _, dispatcher = cluster_of("a")
    _, generate = sent(dispatcher.submit(work_of("r", deadline_ns=5 * NS_PER_S), 2 * NS_PER_S))
    assert generate.timeout_s == 3.0
    assert generate.request_id == "r"


def test_submit_over_the_bound_or_without_worker_leaves_nothing_pending() -> None:
    registry, dispatcher = cluster_of("a")
    for index in range(MAX_PENDING):
        dispatcher.submit(work_of(f"r{index}"), 0)
    with pytest.raises(RequestFailed) as raised:
        dispatcher.submit(work_of("over"), 0)
    assert raised.value.failure.status == 429
    dispatcher.shut_down()
    registry.leave(WorkerId("a"), Incarnation(1))
    with pytest.raises(RequestFailed) as raised:
        dispatcher.submit(work_of("nobody"), 0)
    assert raised.value.failure.status == 503
    assert dispatcher.num_pending == 0


def lose(registry: Registry, dispatcher: Dispatcher, worker_id: WorkerId, generate: Generate) -> list[Action]:
    (left,) = registry.leave(worker_id, generate.receiver)
    return dispatcher.worker_left(left.worker, 0)


def with_prefill_worker(registry: Registry) -> None:
    """Every decode worker that is there is connected with it."""
    names = [worker.worker_id for worker in registry.view.workers]
    assert not isinstance(registry.join(join_of("p", 1, role=Role.PREFILL), 0), Refused)
    for name in names:
        registry.heartbeat(name, WorkerHeartbeat(sender=Incarnation(1), loads=(Load(),), num_prefill_peers=1), 0)


def test_lost_workers_answer_goes_on_elsewhere_from_what_was_delivered() -> None:
    registry, dispatcher = cluster_of("a", "b")
    worker_id, generate = sent(dispatcher.submit(work_of("r", num_top_logprobs=0), 0))
    assert (generate.told, generate.num_prompt_logprobs_told) == ((), 0)
    entry = TokenEntry(text_offset=0, logprobs=TokenLogprobs(token_id=7, logprob=-1.0, top=()))
    deltas = (
        Delta(request_id=generate.request_id, token_ids=(7, 8), text="\u00e9", entries=(entry,)),
        Delta(request_id=generate.request_id, token_ids=(9,), text="xy"),
    )
    dispatcher.generated(worker_id, Generated(sender=generate.receiver, deltas=deltas))
    resumed_on, resumed = sent(lose(registry, dispatcher, worker_id, generate))
    assert (resumed_on, resumed.request_id) == ("b", "r.1")
    assert resumed.told == (Told(token_ids=(7, 8, 9), num_text_chars=3, num_entries=1),)
    assert (resumed.prompt_token_ids, resumed.sampling) == (generate.prompt_token_ids, generate.sampling)
    assert dispatcher.generated(worker_id, delta_of(generate)) == []
    assert dispatcher.num_stale == 1


def test_request_of_which_nothing_was_delivered_begins_anew() -> None:
    registry, dispatcher = cluster_of("a", "b")
    _, again = sent(lose(registry, dispatcher, *sent(dispatcher.submit(work_of("r", num_choices=2), 0))))
    assert again.told == ()


def test_answer_that_goes_on_is_told_of_all_its_workers() -> None:
    registry, dispatcher = cluster_of("a", "b", "c")
    place = sent(dispatcher.submit(work_of("r"), 0))
    for token_id in (4, 5):
        dispatcher.generated(place[0], delta_of(place[1], token_ids=(token_id,)))
        place = sent(lose(registry, dispatcher, *place))
    assert place[1].told == (Told(token_ids=(4, 5), num_text_chars=2),)


def test_worker_that_shuts_down_amid_an_answer_is_replaced_from_what_was_delivered() -> None:
    _, dispatcher = cluster_of("a", "b")
    worker_id, generate = sent(dispatcher.submit(work_of("r"), 0))
    dispatcher.generated(worker_id, delta_of(generate, token_ids=(4,)))
    resumed_on, resumed = sent(dispatcher.failed(worker_id, failed_of(generate, FailureKind.SHUTTING_DOWN), 0))
    assert (resumed_on, resumed.told) == ("b", (Told(token_ids=(4,), num_text_chars=1),))


def test_lost_worker_amid_an_answer_without_another_fails_the_request() -> None:
    registry, dispatcher = cluster_of("a")
    worker_id, generate = sent(dispatcher.submit(work_of("r"), 0))
    dispatcher.generated(worker_id, delta_of(generate))
    (action,) = lose(registry, dispatcher, worker_id, generate)
    assert isinstance(action, Fail) and action.failure.code == "worker_lost"


def test_answer_that_is_too_long_to_be_told_of_fails_with_its_worker() -> None:
    registry, dispatcher = cluster_of("a", "b")
    worker_id, generate = sent(dispatcher.submit(work_of("r", max_tokens=2 * MAX_TOLD_TOKENS), 0))
    dispatcher.generated(worker_id, delta_of(generate, token_ids=(1,) * (MAX_TOLD_TOKENS + 1)))
    (action,) = lose(registry, dispatcher, worker_id, generate)
    assert isinstance(action, Fail) and action.failure.code == "worker_lost"


def test_request_ends_with_its_last_choice() -> None:
    _, dispatcher = cluster_of("a")
    worker_id, generate = sent(dispatcher.submit(work_of("r", num_choices=3), 0))
    assert generate.num_choices == 3
    for choice_index in (2, 0):
        assert len(dispatcher.generated(worker_id, delta_of(generate, choice_index=choice_index, finishes=True))) == 1
        assert dispatcher.num_pending == 1
    dispatcher.generated(worker_id, delta_of(generate, choice_index=1))
    dispatcher.generated(worker_id, delta_of(generate, choice_index=1, finishes=True))
    assert (dispatcher.num_pending, dispatcher.num_stale) == (0, 0)


@pytest.mark.parametrize("choice_index", [0, 2, -1])
def test_delta_of_a_finished_or_impossible_choice_is_refused_and_counted(choice_index: int) -> None:
    _, dispatcher = cluster_of("a")
    worker_id, generate = sent(dispatcher.submit(work_of("r", num_choices=2), 0))
    dispatcher.generated(worker_id, delta_of(generate, choice_index=0, finishes=True))
    wrong = delta_of(generate, choice_index=choice_index, finishes=True)
    assert dispatcher.generated(worker_id, wrong) == []
    assert (dispatcher.num_pending, dispatcher.num_stale) == (1, 1)


@pytest.mark.parametrize("finishes", [False, True])
def test_worker_that_sends_more_tokens_than_were_asked_for_fails_the_request(*, finishes: bool) -> None:
    _, dispatcher = cluster_of("a", "b")
    worker_id, generate = sent(dispatcher.submit(work_of("r", num_choices=2, max_tokens=3), 0))
    other_id, other = sent(dispatcher.submit(work_of("other"), 0))
    for choice_index in (0, 1):
        within = delta_of(generate, token_ids=(4, 5, 6), choice_index=choice_index)
        assert len(dispatcher.generated(worker_id, within)) == 1
    abort, fail = dispatcher.generated(worker_id, delta_of(generate, choice_index=1, finishes=finishes))
    assert isinstance(abort, Send) and isinstance(abort.message, Abort)
    assert isinstance(fail, Fail)
    assert (fail.failure.status, fail.failure.code) == (502, "protocol_error")
    assert "sent 4 tokens where 3 were asked for" in fail.failure.message
    assert dispatcher.generated(worker_id, delta_of(generate, finishes=True)) == []
    assert (dispatcher.num_pending, dispatcher.num_stale) == (1, 1)
    assert len(dispatcher.generated(other_id, delta_of(other, finishes=True))) == 1


def test_tokens_of_all_workers_that_an_answer_had_count_towards_its_bound() -> None:
    registry, dispatcher = cluster_of("a", "b")
    worker_id, generate = sent(dispatcher.submit(work_of("r", max_tokens=3), 0))
    dispatcher.generated(worker_id, delta_of(generate, token_ids=(4, 5)))
    second_id, second = sent(lose(registry, dispatcher, worker_id, generate))
    *_, fail = dispatcher.generated(second_id, delta_of(second, token_ids=(6, 7)))
    assert isinstance(fail, Fail) and fail.failure.code == "protocol_error"


def test_submit_without_a_worker_says_whether_none_joined_or_all_drain() -> None:
    registry, dispatcher = cluster_of()

    def told(request_id: str) -> str:
        with pytest.raises(RequestFailed) as raised:
            dispatcher.submit(work_of(request_id), 0)
        assert (raised.value.failure.status, raised.value.failure.code) == (503, "no_worker")
        return raised.value.failure.message

    assert "no decode worker has joined; start one" in told("r1")
    with_prefill_worker(registry)
    assert "no decode worker has joined; start one" in told("r2")
    registry.join(join_of("a", 1), 0)
    registry.heartbeat(WorkerId("a"), WorkerHeartbeat(sender=Incarnation(1), loads=(Load(),), draining=True), 0)
    assert "all that are there drain" in told("r3")


def test_finished_choices_are_not_generated_again() -> None:
    registry, dispatcher = cluster_of("a", "b")
    with_prefill_worker(registry)
    worker_id, generate = sent(dispatcher.submit(work_of("r", num_choices=2), 0))
    dispatcher.generated(worker_id, delta_of(generate, choice_index=0))
    dispatcher.generated(worker_id, delta_of(generate, choice_index=1, finishes=True))
    resumed_on, resumed = sent(lose(registry, dispatcher, worker_id, generate))
    assert resumed.num_choices == 2
    assert resumed.told == (Told(token_ids=(1,), num_text_chars=1), Told(is_finished=True))
    assert resumed.prefill is not None  # one choice is left, whose tokens can be handed over
    loads = {worker.worker_id: worker.ranks[0] for worker in registry.view.workers}
    assert (loads[resumed_on].num_dispatched_sequences, loads[WorkerId("p")].num_dispatched_tokens) == (1, 3 + 4)
    assert dispatcher.generated(resumed_on, delta_of(resumed, choice_index=1)) == []
    dispatcher.generated(resumed_on, delta_of(resumed, finishes=True))
    assert (dispatcher.num_pending, dispatcher.num_stale) == (0, 1)


def test_choices_that_go_on_apart_are_sent_without_a_prefill_worker() -> None:
    registry, dispatcher = cluster_of("a", "b")
    with_prefill_worker(registry)
    worker_id, generate = sent(dispatcher.submit(work_of("r", num_choices=3), 0))
    assert generate.prefill is not None
    dispatcher.generated(worker_id, delta_of(generate, choice_index=2))
    resumed_on, resumed = sent(lose(registry, dispatcher, worker_id, generate))
    assert resumed.prefill is None
    rank = next(worker for worker in registry.view.workers if worker.worker_id == resumed_on).ranks[0]
    assert (rank.num_dispatched_sequences, rank.num_dispatched_tokens) == (3, 3 * 3 + 1)


def test_prompt_logprobs_that_were_delivered_are_not_asked_for_again() -> None:
    registry, dispatcher = cluster_of("a", "b")
    worker_id, generate = sent(dispatcher.submit(work_of("r", num_prompt_logprobs=0), 0))
    entry = TokenLogprobs(token_id=2, logprob=-1.0, top=())
    delta = Delta(request_id=generate.request_id, token_ids=(), text="", prompt_logprobs=(entry,))
    dispatcher.generated(worker_id, Generated(sender=generate.receiver, deltas=(delta,)))
    _, resumed = sent(lose(registry, dispatcher, worker_id, generate))
    assert (resumed.told, resumed.num_prompt_logprobs_told) == ((), 1)


@pytest.mark.parametrize("num_prompt_logprobs", [None, 0])
def test_prompt_with_logprobs_is_sent_without_a_prefill_worker(num_prompt_logprobs: int | None) -> None:
    registry, dispatcher = cluster_of("a")
    with_prefill_worker(registry)
    _, generate = sent(dispatcher.submit(work_of("r", num_prompt_logprobs=num_prompt_logprobs), 0))
    assert (generate.prefill is None) == (num_prompt_logprobs is not None)
    loads = {worker.worker_id: worker.ranks[0].num_dispatched_tokens for worker in registry.view.workers}
    assert loads == ({"a": 0, "p": 3} if num_prompt_logprobs is None else {"a": 3, "p": 0})


def test_choices_weigh_on_the_rank_that_decodes_them() -> None:
    registry, dispatcher = cluster_of("a")
    dispatcher.submit(work_of("r", num_choices=5), 0)
    assert registry.view.workers[0].ranks[0].num_dispatched_sequences == 5


def test_capacity_refusals_ask_each_worker_once() -> None:
    _, dispatcher = cluster_of("a", "b")
    first, generate = sent(dispatcher.submit(work_of("r"), 0))
    second, again = sent(dispatcher.failed(first, failed_of(generate, FailureKind.CAPACITY), 0))
    assert {first, second} == {"a", "b"}
    (action,) = dispatcher.failed(second, failed_of(again, FailureKind.CAPACITY), 0)
    assert isinstance(action, Fail) and action.failure.status == 429


def test_capacity_refusals_ask_each_rank_once_before_the_client_hears_of_it() -> None:
    _, dispatcher = cluster_of("a", num_ranks=2)
    worker_id, generate = sent(dispatcher.submit(work_of("r"), 0))
    _, again = sent(dispatcher.failed(worker_id, failed_of(generate, FailureKind.CAPACITY), 0))
    assert (generate.dp_rank, again.dp_rank) == (0, 1)
    (action,) = dispatcher.failed(worker_id, failed_of(again, FailureKind.CAPACITY), 0)
    assert isinstance(action, Fail) and action.failure.status == 429


def test_worker_that_shuts_down_is_asked_on_none_of_its_ranks_again() -> None:
    _, dispatcher = cluster_of("a", num_ranks=3)
    worker_id, generate = sent(dispatcher.submit(work_of("r"), 0))
    (action,) = dispatcher.failed(worker_id, failed_of(generate, FailureKind.SHUTTING_DOWN), 0)
    assert isinstance(action, Fail) and action.failure.code == "shutting_down"


def test_worker_left_takes_the_requests_of_all_its_ranks_with_it() -> None:
    registry, dispatcher = cluster_of("a", num_ranks=2)
    for index in range(2):
        dispatcher.submit(work_of(f"r{index}"), 0)
    registry.join(join_of("b", 1, num_ranks=2), 0)
    (left,) = registry.leave(WorkerId("a"), Incarnation(1))
    moved = [sent([action]) for action in dispatcher.worker_left(left.worker, 0)]
    assert [(worker_id, generate.dp_rank) for worker_id, generate in moved] == [("b", 0), ("b", 1)]


def test_submit_spreads_a_burst_over_the_ranks_of_unequal_workers() -> None:
    registry, dispatcher = cluster_of("a", num_ranks=3)
    registry.join(join_of("b", 1), 0)
    places = [sent(dispatcher.submit(work_of(f"r{index}"), 0)) for index in range(MAX_PENDING)]
    assert [(worker_id, generate.dp_rank) for worker_id, generate in places] == [
        ("a", 0),
        ("a", 1),
        ("a", 2),
        ("b", 0),
    ]


def test_lost_request_is_sent_to_at_most_three_workers() -> None:
    registry, dispatcher = cluster_of("a", "b", "c", "d")
    actions = dispatcher.submit(work_of("r"), 0)
    for _ in range(MAX_RETRIES):
        actions = lose(registry, dispatcher, *sent(actions))
    (action,) = lose(registry, dispatcher, *sent(actions))
    assert isinstance(action, Fail)


def test_lost_workers_requests_spread_over_those_that_are_left() -> None:
    registry, dispatcher = cluster_of("a")
    for index in range(MAX_PENDING):
        dispatcher.submit(work_of(f"r{index}"), 0)
    for worker_id in "bc":
        registry.join(join_of(worker_id, 1), 0)
    (left,) = registry.leave(WorkerId("a"), Incarnation(1))
    targets = [sent([action])[0] for action in dispatcher.worker_left(left.worker, 0)]
    assert sorted(targets) == ["b", "b", "c", "c"]
