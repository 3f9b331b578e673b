"""Routing: each clause of the definition of load, and that a burst spreads over ranks."""

from collections.abc import Set
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.cluster.registry import Refused, Registry
from pdserve.cluster.view import ClusterView, RankView, WorkerView
from pdserve.config.role import Role
from pdserve.errors import CapacityError
from pdserve.ids import Incarnation, WorkerId
from pdserve.routing.least_loaded import LeastLoaded, Route
from pdserve.routing.order import RankKey
from pdserve.wire.cluster import Join, Load, WorkerHeartbeat
from pdserve.wire.peer import PROTOCOL_VERSION

EMPTY = Load(num_free_pages=10, num_pages=10)


def worker(worker_id: str, role: Role, *loads: Load) -> WorkerView:
    """Of one rank for each load; without any, of one empty rank."""
    return WorkerView(
        worker_id=WorkerId(worker_id),
        incarnation=Incarnation(1),
        role=role,
        url=f"http://{worker_id}",
        max_model_len=100,
        tensor_parallel_size=1,
        ranks=tuple(RankView(dp_rank=dp_rank, load=load) for dp_rank, load in enumerate(loads or (EMPTY,))),
        joined_ns=0,
        lease_ns=1,
        lease_deadline_ns=1,
    )


def view_of(*workers: WorkerView) -> ClusterView:
    return ClusterView(tuple(sorted(workers, key=lambda each: each.worker_id)))


def choose(
    view: ClusterView,
    *,
    num_prompt_tokens: int,
    excluded_workers: Set[WorkerId] = frozenset(),
    excluded_ranks: Set[RankKey] = frozenset(),
) -> Route:
    """Of workers that are all new to it."""
    balance = LeastLoaded()
    balance.update({each.worker_id: each for each in view.workers})
    return balance.choose(
        num_prompt_tokens=num_prompt_tokens, excluded_workers=excluded_workers, excluded_ranks=excluded_ranks
    )


def names(route: Route) -> tuple[str, str | None]:
    return route.decode.worker_id, route.prefill.worker_id if route.prefill else None


def place(route: Route) -> tuple[WorkerId, int]:
    return route.decode.worker_id, route.dp_rank


def test_choose_takes_the_decode_worker_with_fewest_sequences() -> None:
    view = view_of(
        worker("d0", Role.DECODE, Load(num_running=2, num_waiting=1, num_free_pages=9, num_pages=9)),
        worker("d1", Role.DECODE, Load(num_running=2, num_free_pages=1, num_pages=9)),
        worker("p0", Role.PREFILL),
    )
    assert names(choose(view, num_prompt_tokens=50)) == ("d1", "p0")


def test_choose_between_equal_decode_workers_takes_more_free_pages_then_the_lower_id() -> None:
    fuller, emptier = Load(num_free_pages=3, num_pages=9), Load(num_free_pages=4, num_pages=9)
    view = view_of(
        worker("d0", Role.DECODE, fuller), worker("d1", Role.DECODE, emptier), worker("d2", Role.DECODE, emptier)
    )
    assert names(choose(view, num_prompt_tokens=50)) == ("d1", None)


def test_choose_takes_a_decode_worker_without_free_pages_last() -> None:
    view = view_of(
        worker("d0", Role.DECODE, Load(num_free_pages=0, num_pages=9)),
        worker("d1", Role.DECODE, Load(num_running=8, num_free_pages=1, num_pages=9)),
    )
    assert names(choose(view, num_prompt_tokens=50)) == ("d1", None)
    assert names(choose(view, num_prompt_tokens=50, excluded_workers={WorkerId("d1")})) == ("d0", None)


def test_choose_looks_at_each_rank_and_not_at_the_worker() -> None:
    idle_beside_busy = worker("d0", Role.DECODE, Load(num_running=9), Load(num_running=9), Load(num_running=1))
    view = view_of(idle_beside_busy, worker("d1", Role.DECODE, Load(num_running=2)))
    assert place(choose(view, num_prompt_tokens=50)) == ("d0", 2)


def test_choose_takes_a_rank_without_free_pages_last() -> None:
    full = Load(num_free_pages=0, num_pages=9)
    view = view_of(worker("d0", Role.DECODE, full, Load(num_running=8, num_free_pages=1, num_pages=9)))
    assert place(choose(view, num_prompt_tokens=50)) == ("d0", 1)
    assert place(choose(view, num_prompt_tokens=50, excluded_ranks={(WorkerId("d0"), 1)})) == ("d0", 0)


def test_choose_between_equal_ranks_takes_the_lower_worker_id_then_the_lower_rank() -> None:
    view = view_of(worker("d1", Role.DECODE, EMPTY, EMPTY), worker("d0", Role.DECODE, EMPTY, EMPTY))
    order: list[tuple[WorkerId, int]] = []
    for _ in range(4):
        order.append(place(choose(view, num_prompt_tokens=50, excluded_ranks=set(order))))
    assert order == [("d0", 0), ("d0", 1), ("d1", 0), ("d1", 1)]


def test_choose_excluded_worker_takes_its_ranks_and_its_prefills_with_it() -> None:
    view = view_of(
        worker("d0", Role.DECODE, EMPTY, EMPTY),
        worker("d1", Role.DECODE, Load(num_running=9)),
        worker("p0", Role.PREFILL),
        worker("p1", Role.PREFILL, Load(num_waiting_tokens=9)),
    )
    excluded = {WorkerId("d0"), WorkerId("p0")}
    assert names(choose(view, num_prompt_tokens=50, excluded_workers=excluded)) == ("d1", "p1")


def test_choose_with_every_rank_excluded_says_so() -> None:
    view = view_of(worker("d0", Role.DECODE, EMPTY, EMPTY))
    with pytest.raises(CapacityError, match="failed or refused"):
        choose(view, num_prompt_tokens=5, excluded_ranks={(WorkerId("d0"), 0), (WorkerId("d0"), 1)})


def test_choose_takes_the_prefill_worker_with_fewest_waiting_tokens() -> None:
    view = view_of(
        worker("d0", Role.DECODE),
        worker("p0", Role.PREFILL, Load(num_running=0, num_waiting_tokens=900)),
        worker("p1", Role.PREFILL, Load(num_running=9, num_waiting=9, num_waiting_tokens=899)),
    )
    assert names(choose(view, num_prompt_tokens=50)) == ("d0", "p1")


def test_choose_colocated_worker_prefills_for_itself() -> None:
    view = view_of(worker("b0", Role.BOTH), worker("p0", Role.PREFILL))
    assert names(choose(view, num_prompt_tokens=50)) == ("b0", None)


def test_choose_colocated_worker_is_no_prefill_target_of_another() -> None:
    view = view_of(worker("b0", Role.BOTH, Load(num_running=1)), worker("d0", Role.DECODE))
    assert names(choose(view, num_prompt_tokens=50)) == ("d0", None)


@pytest.mark.parametrize(("num_prompt_tokens", "prefill"), [(1, None), (2, "p0")])
def test_choose_prompt_of_one_token_is_never_sent_to_a_prefill_worker(
    num_prompt_tokens: int, prefill: str | None
) -> None:
    view = view_of(worker("d0", Role.DECODE), worker("p0", Role.PREFILL))
    assert names(choose(view, num_prompt_tokens=num_prompt_tokens)) == ("d0", prefill)


def test_choose_without_decode_worker_raises_capacity_error() -> None:
    with pytest.raises(CapacityError, match="no decode worker has joined") as raised:
        choose(view_of(worker("p0", Role.PREFILL)), num_prompt_tokens=5)
    assert raised.value.retry_after_s > 0


def test_choose_with_every_decode_worker_excluded_says_so() -> None:
    with pytest.raises(CapacityError, match="failed or refused"):
        choose(view_of(worker("d0", Role.DECODE)), num_prompt_tokens=5, excluded_workers={WorkerId("d0")})


def draining(worker_view: WorkerView) -> WorkerView:
    return replace(worker_view, draining=True)


def test_choose_leaves_out_what_drains_however_empty_it_is() -> None:
    busy = Load(num_running=9, num_waiting_tokens=900, num_free_pages=1, num_pages=10)
    view = view_of(
        worker("d0", Role.DECODE, busy),
        draining(worker("d1", Role.DECODE)),
        draining(worker("d2", Role.BOTH)),
        worker("p0", Role.PREFILL, busy),
        draining(worker("p1", Role.PREFILL)),
    )
    assert names(choose(view, num_prompt_tokens=50)) == ("d0", "p0")


def test_choose_with_every_prefill_worker_draining_lets_the_decode_worker_prefill() -> None:
    view = view_of(worker("d0", Role.DECODE), draining(worker("p0", Role.PREFILL)))
    assert names(choose(view, num_prompt_tokens=50)) == ("d0", None)


def test_choose_with_every_decode_worker_draining_says_so() -> None:
    view = view_of(draining(worker("d0", Role.DECODE)), worker("p0", Role.PREFILL))
    with pytest.raises(CapacityError, match="every decode worker drains"):
        choose(view, num_prompt_tokens=50)


loads = st.builds(
    Load,
    num_running=st.integers(0, 3),
    num_waiting=st.integers(0, 3),
    num_waiting_tokens=st.integers(0, 3),
    num_free_pages=st.integers(0, 3),
    num_pages=st.just(3),
)
decoders = st.tuples(st.sampled_from((Role.DECODE, Role.BOTH)), st.lists(loads, min_size=1, max_size=3))
prefillers = st.tuples(st.just(Role.PREFILL), st.lists(loads, min_size=1, max_size=1))
views = st.lists(decoders | prefillers, max_size=6).map(
    lambda rows: view_of(*(worker(f"w{index}", role, *loads) for index, (role, loads) in enumerate(rows)))
)
worker_ids = st.sampled_from(["w0", "w1", "w2"]).map(WorkerId)


@given(
    view=views,
    num_prompt_tokens=st.integers(1, 3),
    excluded_workers=st.frozensets(worker_ids),
    excluded_ranks=st.frozensets(st.tuples(worker_ids, st.integers(0, 2))),
)
def test_choose_is_deterministic_and_agrees_with_a_sorted_list(
    view: ClusterView,
    num_prompt_tokens: int,
    excluded_workers: frozenset[WorkerId],
    excluded_ranks: frozenset[tuple[WorkerId, int]],
) -> None:
    def chosen() -> Route:
        return choose(
            view,
            num_prompt_tokens=num_prompt_tokens,
            excluded_workers=excluded_workers,
            excluded_ranks=excluded_ranks,
        )

    allowed = [each for each in view.workers if each.worker_id not in excluded_workers]
    ranking = sorted(
        (rank.load.num_free_pages == 0, rank.num_sequences, -rank.load.num_free_pages, each.worker_id, rank.dp_rank)
        for each in allowed
        for rank in each.ranks
        if each.role is not Role.PREFILL and (each.worker_id, rank.dp_rank) not in excluded_ranks
    )
    if not ranking:
        with pytest.raises(CapacityError):
            chosen()
        return
    route = chosen()
    assert route == chosen()
    assert place(route) == ranking[0][3:]
    queues = sorted((each.ranks[0].num_waiting_tokens, each.worker_id) for each in allowed if each.role is Role.PREFILL)
    if num_prompt_tokens == 1 or route.decode.role is Role.BOTH or not queues:
        assert route.prefill is None
    else:
        assert route.prefill is not None and route.prefill.worker_id == queues[0][1]


def join_of(worker_id: str, role: Role, loads: tuple[Load, ...]) -> Join:
    return Join(
        protocol_version=PROTOCOL_VERSION,
        worker_id=WorkerId(worker_id),
        incarnation=Incarnation(1),
        role=role,
        url="http://w",
        model_name="m",
        model_fingerprint="f",
        max_model_len=100,
        lease_s=1.0,
        tensor_parallel_size=1,
        loads=loads,
    )


def registry_of(*, ranks_of_decoders: list[int], num_prefill: int = 0, load: Load = EMPTY) -> Registry:
    registry = Registry(model_name="m", max_workers=8)
    joins = [join_of(f"d{index}", Role.DECODE, (load,) * count) for index, count in enumerate(ranks_of_decoders)]
    joins += [join_of(f"p{index}", Role.PREFILL, (load,)) for index in range(num_prefill)]
    for join in joins:
        assert not isinstance(registry.join(join, 0), Refused)
    return registry


def dispatch(registry: Registry, num_requests: int, *, num_prompt_tokens: int = 10) -> None:
    """As the gateway does it, with no heartbeat between."""
    for _ in range(num_requests):
        route = choose(registry.view, num_prompt_tokens=num_prompt_tokens)
        registry.dispatched(route.decode.worker_id, dp_rank=route.dp_rank, num_sequences=1, num_tokens=0)
        if route.prefill is not None:
            registry.dispatched(route.prefill.worker_id, dp_rank=0, num_sequences=1, num_tokens=num_prompt_tokens)


@given(
    ranks_of_decoders=st.lists(st.integers(1, 8), min_size=1, max_size=4),
    num_prefill=st.integers(1, 4),
    num_requests=st.integers(1, 60),
)
def test_choose_gives_ranks_of_unequal_workers_equal_numbers_of_a_burst(
    ranks_of_decoders: list[int], num_prefill: int, num_requests: int
) -> None:
    registry = registry_of(ranks_of_decoders=ranks_of_decoders, num_prefill=num_prefill)
    dispatch(registry, num_requests)
    decode_counts = [rank.num_dispatched_sequences for _, rank in registry.view.decoding_ranks()]
    prefill_counts = [each.ranks[0].num_dispatched_sequences for each in registry.view.prefilling()]
    for counts in (decode_counts, prefill_counts):
        assert sum(counts) == num_requests
        assert max(counts) - min(counts) <= 1


@given(
    running=st.lists(st.lists(st.integers(0, 12), min_size=1, max_size=4), min_size=1, max_size=3),
    num_requests=st.integers(0, 80),
)
def test_choose_fills_the_emptier_ranks_up_to_the_level_of_the_others(
    running: list[list[int]], num_requests: int
) -> None:
    registry = registry_of(ranks_of_decoders=[len(counts) for counts in running])
    for index, counts in enumerate(running):
        loads = tuple(Load(num_running=count, num_free_pages=5, num_pages=9) for count in counts)
        assert registry.heartbeat(WorkerId(f"d{index}"), WorkerHeartbeat(sender=Incarnation(1), loads=loads), 0)
    dispatch(registry, num_requests)
    levels = [count for counts in running for count in counts]
    turns = [0] * len(levels)
    for _ in range(num_requests):
        lowest = min(range(len(levels)), key=lambda index: (levels[index], turns[index]))
        levels[lowest] += 1
        turns[lowest] += 1
    assert [rank.num_sequences for _, rank in registry.view.decoding_ranks()] == levels


def test_choose_lets_idle_ranks_and_prefill_workers_take_turns_over_heartbeats() -> None:
    registry = registry_of(ranks_of_decoders=[2, 1], num_prefill=2)
    chosen: list[tuple[WorkerId, int]] = []
    prefills: list[str | None] = []
    for _ in range(6):
        route = choose(registry.view, num_prompt_tokens=10)
        chosen.append(place(route))
        prefills.append(names(route)[1])
        dispatch(registry, 1)
        for worker_id, num_ranks in (("d0", 2), ("d1", 1), ("p0", 1), ("p1", 1)):
            beat = WorkerHeartbeat(sender=Incarnation(1), loads=(EMPTY,) * num_ranks)
            assert registry.heartbeat(WorkerId(worker_id), beat, 0)
    assert chosen == [("d0", 0), ("d0", 1), ("d1", 0)] * 2
    assert prefills == ["p0", "p1"] * 3
