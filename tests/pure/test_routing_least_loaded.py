"""Routing: each clause of the definition of load, and that a burst spreads."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.cluster.registry import Refused, Registry
from pdserve.cluster.view import ClusterView, WorkerView
from pdserve.config.role import Role
from pdserve.errors import CapacityError
from pdserve.ids import Incarnation, WorkerId
from pdserve.routing.least_loaded import Route, choose
from pdserve.wire.cluster import Join, Load
from pdserve.wire.peer import PROTOCOL_VERSION


def worker(worker_id: str, role: Role, load: Load | None = None) -> WorkerView:
    return WorkerView(
        worker_id=WorkerId(worker_id),
        incarnation=Incarnation(1),
        role=role,
        url=f"http://{worker_id}",
        max_model_len=100,
        load=load or Load(num_free_pages=10, num_pages=10),
        joined_ns=0,
        lease_ns=1,
        lease_deadline_ns=1,
    )


def view_of(*workers: WorkerView) -> ClusterView:
    return ClusterView(tuple(sorted(workers, key=lambda each: each.worker_id)))


def names(route: Route) -> tuple[str, str | None]:
    return route.decode.worker_id, route.prefill.worker_id if route.prefill else None


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
    assert names(choose(view, num_prompt_tokens=50, excluded={WorkerId("d1")})) == ("d0", None)


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
        choose(view_of(worker("d0", Role.DECODE)), num_prompt_tokens=5, excluded={WorkerId("d0")})


loads = st.builds(
    Load,
    num_running=st.integers(0, 3),
    num_waiting=st.integers(0, 3),
    num_waiting_tokens=st.integers(0, 3),
    num_free_pages=st.integers(0, 3),
    num_pages=st.just(3),
)
views = st.lists(st.tuples(st.sampled_from(Role), loads), max_size=6).map(
    lambda rows: view_of(*(worker(f"w{index}", role, load) for index, (role, load) in enumerate(rows)))
)


@given(view=views, num_prompt_tokens=st.integers(1, 3), excluded=st.sets(st.sampled_from(["w0", "w1", "w2"])))
def test_choose_is_deterministic_and_takes_only_workers_of_the_right_role(
    view: ClusterView, num_prompt_tokens: int, excluded: set[str]
) -> None:
    excluded_ids = {WorkerId(name) for name in excluded}
    candidates = [each for each in view.decoding() if each.worker_id not in excluded_ids]
    if not candidates:
        with pytest.raises(CapacityError):
            choose(view, num_prompt_tokens=num_prompt_tokens, excluded=excluded_ids)
        return
    route = choose(view, num_prompt_tokens=num_prompt_tokens, excluded=excluded_ids)
    assert route == choose(view, num_prompt_tokens=num_prompt_tokens, excluded=excluded_ids)
    assert route.decode in candidates
    roomy = [each for each in candidates if each.load.num_free_pages] or candidates
    assert route.decode.num_sequences == min(each.num_sequences for each in roomy)
    if route.prefill is not None:
        assert route.prefill.role is Role.PREFILL and route.decode.role is Role.DECODE and num_prompt_tokens > 1
        assert route.prefill.worker_id not in excluded_ids


@given(num_decode=st.integers(1, 4), num_prefill=st.integers(1, 4), num_requests=st.integers(1, 24))
def test_choose_spreads_a_burst_between_two_heartbeats(num_decode: int, num_prefill: int, num_requests: int) -> None:
    registry = Registry(model_name="m", max_workers=8)
    for role, count in ((Role.DECODE, num_decode), (Role.PREFILL, num_prefill)):
        for index in range(count):
            join = Join(
                protocol_version=PROTOCOL_VERSION,
                worker_id=WorkerId(f"{role.value}{index}"),
                incarnation=Incarnation(1),
                role=role,
                url="http://w",
                model_name="m",
                model_fingerprint="f",
                max_model_len=100,
                lease_s=1.0,
                load=Load(num_free_pages=5, num_pages=5),
            )
            assert not isinstance(registry.join(join, 0), Refused)
    for _ in range(num_requests):
        route = choose(registry.view, num_prompt_tokens=10)
        assert route.prefill is not None
        registry.dispatched(route.decode.worker_id, num_sequences=1, num_tokens=0)
        registry.dispatched(route.prefill.worker_id, num_sequences=1, num_tokens=10)
    for workers in (list(registry.view.decoding()), list(registry.view.prefilling())):
        counts = [each.num_dispatched_sequences for each in workers]
        assert sum(counts) == num_requests
        assert max(counts) - min(counts) <= 1
