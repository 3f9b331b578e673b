"""The kernel's CPU lists: what it writes is read, garbage is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.fabric.topology.cpu_list import MAX_CPUS, format_cpu_list, parse_cpu_list

cpu_sets = st.sets(st.integers(min_value=0, max_value=MAX_CPUS - 1), max_size=200)


@given(cpu_sets)
def test_cpu_list_formatted_and_parsed_is_the_same_set(cpus: set[int]) -> None:
    assert parse_cpu_list(format_cpu_list(cpus)) == tuple(sorted(cpus))


@given(st.sets(st.integers(min_value=0, max_value=40)))
def test_cpu_list_formatted_has_one_part_for_each_run(cpus: set[int]) -> None:
    num_runs = sum(1 for cpu in cpus if cpu - 1 not in cpus)
    assert len([part for part in format_cpu_list(cpus).split(",") if part]) == num_runs


@given(st.text(alphabet="0123456789-, \nx", max_size=20))
def test_cpu_list_of_any_text_is_cpus_or_a_value_error(text: str) -> None:
    try:
        cpus = parse_cpu_list(text)
    except ValueError:
        return
    assert list(cpus) == sorted(set(cpus))


@pytest.mark.parametrize(
    ("text", "cpus"),
    [
        ("", ()),
        ("\n", ()),
        ("0", (0,)),
        ("0-3,8\n", (0, 1, 2, 3, 8)),
        ("2,0-1,1", (0, 1, 2)),
    ],
)
def test_cpu_list_as_the_kernel_writes_it_is_read(text: str, cpus: tuple[int, ...]) -> None:
    assert parse_cpu_list(text) == cpus


@pytest.mark.parametrize("text", ["-1", "3-1", "0-", "a", "0,,1", "0-99999999999", "٣", "1-2-3", f"{MAX_CPUS}"])
def test_cpu_list_of_garbage_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no"):
        parse_cpu_list(text)
