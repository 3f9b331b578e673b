import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.units import NS_PER_S, div_ceil, div_exact, ns_to_seconds, seconds_to_ns


@given(dividend=st.integers(-(10**30), 10**30), divisor=st.integers(1, 10**15))
def test_units_div_ceil_is_the_least_integer_not_below(dividend: int, divisor: int) -> None:
    quotient = div_ceil(dividend, divisor)
    assert (quotient - 1) * divisor < dividend <= quotient * divisor


@given(quotient=st.integers(-(10**15), 10**15), divisor=st.integers(2, 10**6))
def test_units_div_exact_refuses_a_remainder(quotient: int, divisor: int) -> None:
    assert div_exact(quotient * divisor, divisor) == quotient
    with pytest.raises(ValueError, match="is not a multiple"):
        div_exact(quotient * divisor + 1, divisor)


@given(duration_ns=st.integers(0, 10**15))
def test_units_seconds_and_nanoseconds_round_trip(duration_ns: int) -> None:
    assert seconds_to_ns(ns_to_seconds(duration_ns)) == duration_ns
    assert seconds_to_ns(1.5) == 3 * NS_PER_S // 2
