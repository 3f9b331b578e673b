"""Arrivals and synthetic loads: the distributions that they promise, repeatable by seed, and what is refused."""

import itertools
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.errors import ConfigError
from pdserve.workload.arrivals import arrivals_s
from pdserve.workload.synthetic import SyntheticWorkload, parse_synthetic

NUM_MANY = 20_000


def gaps_of(arrivals: list[float]) -> list[float]:
    return [after - before for before, after in itertools.pairwise([0.0, *arrivals])]


@pytest.mark.parametrize("cv", [0.0, 0.5, 1.0, 2.0])
def test_gaps_of_many_arrivals_have_the_mean_and_variation_asked_for(cv: float) -> None:
    gaps = gaps_of(arrivals_s(num_requests=NUM_MANY, rate_per_s=4.0, cv=cv, seed=7))
    mean = statistics.fmean(gaps)
    assert mean == pytest.approx(0.25, rel=0.05)
    assert statistics.pstdev(gaps) / mean == pytest.approx(cv, rel=0.05, abs=1e-9)


def test_gaps_of_a_poisson_process_are_longer_than_their_mean_as_often_as_exponential_ones() -> None:
    gaps = gaps_of(arrivals_s(num_requests=NUM_MANY, rate_per_s=1.0, cv=1.0, seed=3))
    assert sum(gap > 1.0 for gap in gaps) / NUM_MANY == pytest.approx(0.3679, abs=0.01)


@given(
    num_requests=st.integers(0, 50),
    rate=st.floats(0.01, 100),
    cv=st.floats(0, 4),
    seed=st.integers(0, 2**32),
)
def test_arrivals_with_one_seed_ascend_and_scale_with_the_rate(
    num_requests: int, rate: float, cv: float, seed: int
) -> None:
    once = arrivals_s(num_requests=num_requests, rate_per_s=rate, cv=cv, seed=seed)
    assert once == arrivals_s(num_requests=num_requests, rate_per_s=rate, cv=cv, seed=seed)
    assert once == sorted(once)
    assert len(once) == num_requests
    slower = arrivals_s(num_requests=num_requests, rate_per_s=rate / 2, cv=cv, seed=seed)
    assert slower == pytest.approx([2 * instant for instant in once])


def test_arrivals_with_other_seeds_differ_from_each_other() -> None:
    one, other = (arrivals_s(num_requests=5, rate_per_s=1, cv=1, seed=seed) for seed in (1, 2))
    assert one != other


def test_synthetic_workload_with_every_key_is_read_as_written() -> None:
    assert parse_synthetic("prompt=256,output=64,rate=0.5,cv=2,seed=9,prefix=100") == SyntheticWorkload(
        num_prompt_tokens=256, num_output_tokens=64, rate_per_s=0.5, cv=2.0, seed=9, num_prefix_tokens=100
    )


def test_synthetic_workload_without_optional_keys_is_poisson_with_the_default_seed() -> None:
    workload = parse_synthetic("prompt=2, output=3, rate=4", default_seed=5)
    assert (workload.cv, workload.seed, workload.num_prefix_tokens) == (1.0, 5, 0)
    requests = workload.requests(4)
    assert [request.arrival_s for request in requests] == arrivals_s(num_requests=4, rate_per_s=4, cv=1, seed=5)
    assert {(request.num_prompt_tokens, request.num_output_tokens) for request in requests} == {(2, 3)}
    assert {(request.prefix_blocks, request.block_tokens) for request in requests} == {((), 0)}


def test_synthetic_workload_with_a_prefix_shares_one_block() -> None:
    requests = parse_synthetic("prompt=50,output=3,rate=4,prefix=20").requests(3)
    assert {(request.prefix_blocks, request.block_tokens) for request in requests} == {((0,), 20)}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("prompt=256,output=64", "needs rate"),
        ("", "'' is no part of a synthetic workload"),
        (
            "prompt=256,output=64,rate=1,burst=2",
            "'burst=2' is no part of a synthetic workload; it knows prompt, output, rate, cv",
        ),
        ("prompt=256,output=64,rate=1,rate=2", "'rate' twice"),
        ("prompt=0,output=64,rate=1", "prompt=0 of a synthetic workload must be a whole number of 1 or more"),
        ("prompt=1.5,output=64,rate=1", "prompt=1.5"),
        ("prompt=256,output=-1,rate=1", "output=-1"),
        ("prompt=256,output=64,rate=0", "must be over 0"),
        ("prompt=256,output=64,rate=nan", "rate=nan"),
        ("prompt=256,output=64,rate=inf", "rate=inf"),
        ("prompt=256,output=64,rate=1,cv=-1", "cv=-1"),
        ("prompt=256,output=64,rate=1,cv=101", "must be 100 or less"),
        ("prompt=256,output=64,rate=1,prefix=257", "prefix of 257 tokens is longer than the prompt of 256"),
    ],
)
def test_synthetic_workload_that_makes_no_sense_is_refused_with_the_reason(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_synthetic(text)
    assert said in refused.value.message
