"""Two runs against each other: pairs, percentiles and intervals."""

import math
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.pure.load_results import drawn_request, drawn_requests, load_result, refused_request

from pdserve.bench.load.result import LoadResult
from pdserve.bench.report.bootstrap import Samples, intervals
from pdserve.bench.report.compare import Row, compare, compare_files
from pdserve.errors import ConfigError
from pdserve.workload.objective import Objective


def row_of(rows: list[Row], name: str) -> Row:
    return next(row for row in rows if row.name == name)


def write(path: Path, result: LoadResult) -> Path:
    path.write_bytes(msgspec.json.encode(result))
    return path


@given(
    members=st.lists(st.lists(st.floats(0, 10), max_size=4), min_size=1, max_size=6),
    percent=st.sampled_from([1.0, 50.0, 90.0, 99.0, 100.0]),
    data=st.data(),
)
def test_percentile_of_a_resample_equals_that_of_the_repeated_values(
    members: list[list[float]], percent: float, data: st.DataObject
) -> None:
    counts = [data.draw(st.integers(0, 3)) for _ in members]
    repeated = sorted(
        value for values, count in zip(members, counts, strict=True) for value in values for _ in range(count)
    )
    (found,) = Samples(members).percentiles([percent], np.array(counts))
    if not repeated:
        assert math.isnan(found)
    else:
        assert found == repeated[max(1, math.ceil(len(repeated) * percent / 100)) - 1]


def test_interval_of_a_mean_covers_it_and_narrows_with_more_members() -> None:
    widths: list[float] = []
    for num_members in (25, 400):
        values = np.random.default_rng(num_members).normal(10, 1, size=num_members)
        (interval,) = intervals(num_members, lambda counts, values=values: [float(values @ counts / counts.sum())])
        assert interval.low < values.mean() < interval.high
        widths.append(interval.high - interval.low)
    assert widths[1] == pytest.approx(widths[0] / 4, rel=0.3)


def test_ratio_of_a_run_to_one_twice_as_slow_has_a_narrow_interval_around_two() -> None:
    rows = compare(load_result(drawn_requests(80)), load_result(drawn_requests(80, slower=2.0)))
    ttft = row_of(rows, "TTFT p50")
    assert ttft.value == pytest.approx(2.0, abs=0.05)
    assert 1.9 < ttft.interval.low <= ttft.value <= ttft.interval.high < 2.1
    assert row_of(rows, "attainment").value < 0


def test_intervals_of_a_median_cover_the_true_one_about_as_often_as_they_say() -> None:
    num_covered = 0
    for seed in range(20):
        values = np.random.default_rng(seed).normal(10, 1, size=60)
        samples = Samples([[float(value)] for value in values])
        (interval,) = intervals(len(values), lambda counts, samples=samples: samples.percentiles([50], counts))
        num_covered += interval.low <= 10 <= interval.high
    assert 16 <= num_covered <= 20


def test_run_compared_with_itself_has_only_ratios_of_one() -> None:
    run = load_result(drawn_requests(20))
    for row in compare(run, run):
        same = 0.0 if row.name == "attainment" else 1.0
        assert (row.value, row.interval.low, row.interval.high) == (same, same, same)


def test_attainment_counts_a_refusal_as_a_miss() -> None:
    good = tuple(drawn_request(index, seed=0) for index in range(10))
    lax = Objective(ttft_s=100.0)
    worse = (*good[:9], refused_request(9.0))
    rows = compare(load_result(good, objective=lax), load_result(worse, objective=lax))
    assert (row_of(rows, "attainment").a, row_of(rows, "attainment").b) == (1.0, 0.9)


def test_tokens_that_come_together_have_no_ratio_of_gaps() -> None:
    together = msgspec.structs.replace(drawn_request(0.0, seed=0), token_s=(1.0, 1.0, 1.0))
    text_row = row_of(compare(load_result((together,)), load_result((together,))), "ITL p50")
    assert math.isnan(text_row.value)


def test_table_names_the_settings_that_differ(tmp_path: Path) -> None:
    requests = drawn_requests(20)
    a = write(tmp_path / "a.json", load_result(requests, configuration={"chunk_tokens": "64", "seed": "1"}))
    b = write(tmp_path / "b.json", load_result(requests, configuration={"chunk_tokens": "256", "seed": "1"}))
    text = compare_files(a, b)
    assert "chunk_tokens: 64 in A, 256 in B" in text
    assert "seed" not in text
    assert "ITL p99" in text


def test_runs_of_different_arrivals_are_refused_with_the_first_difference(tmp_path: Path) -> None:
    requests = drawn_requests(5)
    a = write(tmp_path / "a.json", load_result(requests))
    fewer = write(tmp_path / "b.json", load_result(requests[:4]))
    moved = write(tmp_path / "c.json", load_result((*requests[:4], drawn_request(2.25, seed=0))))
    with pytest.raises(ConfigError, match="5 requests and B 4"):
        compare_files(a, fewer)
    with pytest.raises(ConfigError, match=r"request 4 is due at 2\.000 s \(64/20\) in A and at 2\.250 s"):
        compare_files(a, moved)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"not json", "is not a result.json"),
        (b"{}", "is not a result.json"),
        (b"\xff\xfe", "is not a result.json"),
        (msgspec.json.encode(load_result(())), "no requests"),
        (msgspec.json.encode(msgspec.structs.replace(load_result(drawn_requests(1)), version=99)), "version 99"),
    ],
)
def test_file_that_is_no_result_is_refused_with_its_name(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "bad.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=rf"bad\.json.*{message}"):
        compare_files(path, path)


def test_file_that_is_not_there_is_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        compare_files(tmp_path / "a.json", tmp_path / "b.json")
