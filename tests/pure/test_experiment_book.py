"""The experiment's book and its statistics, on runs that nobody ran."""

import re
from pathlib import Path

import msgspec
import pytest
from tests.pure.load_results import drawn_requests, load_result, refused_request

from pdserve.bench.experiment.book import Book, Reference, RunRecord, felt, load, require_resumable, save
from pdserve.bench.experiment.conditions import Conditions
from pdserve.bench.experiment.effects import effects, table
from pdserve.bench.experiment.points import POINTS, Arm, Slo
from pdserve.bench.experiment.schedule import planned_runs
from pdserve.bench.load.result import Distribution
from pdserve.bench.provenance import Machine
from pdserve.errors import ConfigError

POINT = POINTS[0]


def empty_book() -> Book:
    return Book(
        machine=Machine(cpu="a CPU", num_cpus=2, memory_bytes=2**34, kernel="6.1", python="3.11"),
        model="a model",
        cpus=(0, 1),
        seconds=60.0,
        slo=Slo(),
        reference=Reference(prefill_s={256: 0.5}),
    )


def record(arm: Arm, *, seed: int = 0, itl_p99_s: float = 0.1, stolen: float = 0.0, gemm_s: float = 0.003) -> RunRecord:
    result = load_result((*drawn_requests(10, seed=seed), refused_request(5.0)))
    itl = Distribution(num_samples=100, mean=0.05, p50=0.05, p90=0.06, p99=itl_p99_s, max=1.0)
    return RunRecord(
        point=POINT,
        seed=seed,
        arm=arm,
        started="2026-11-30T00:00:00Z",
        commit=None,
        conditions=Conditions(
            steal_share=stolen,
            foreign_share=0.0,
            own_share=0.8,
            psi_cpu_share=None,
            gemms_s=((gemm_s, 0.004), (gemm_s, 0.004)),
        ),
        summary=msgspec.structs.replace(result.summary, itl=itl),
        felt=felt(result.requests),
    )


def book_of(*records: RunRecord) -> Book:
    return msgspec.structs.replace(empty_book(), records=records)


def test_book_that_was_saved_is_read_back_equal(tmp_path: Path) -> None:
    book = book_of(record(Arm.WHOLE), record(Arm.APART, stolen=0.5))
    save(book, tmp_path / "new" / "book.json")
    assert load(tmp_path / "new" / "book.json") == book
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["book.json"]


@pytest.mark.parametrize("content", [b"{", b"{}", b'{"version": 1}'])
def test_file_that_is_no_book_is_refused_with_its_name(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "bad.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"bad\.json is no book"):
        load(path)


def test_resumed_book_lacks_what_was_not_run_and_what_was_void() -> None:
    runs = planned_runs([POINT], num_seeds=1)
    book = book_of(record(Arm.WHOLE), record(Arm.APART, stolen=0.5))
    assert {run.arm for run in book.missing(runs)} == {Arm.APART, Arm.CHUNKED}
    again = book.with_record(record(Arm.APART))
    assert {run.arm for run in again.missing(runs)} == {Arm.CHUNKED}
    assert again.num_void == 1


def test_runs_that_were_made_least_often_come_first() -> None:
    runs = planned_runs([POINT], num_seeds=1)
    first, *others = (record(run.arm, stolen=0.5) for run in runs)
    assert book_of(first).missing(runs) == [*runs[1:], runs[0]]
    assert book_of(first, *others).missing(runs) == runs


def test_runs_are_judged_by_what_the_cores_did_in_most_of_them() -> None:
    slow = record(Arm.WHOLE, gemm_s=0.006)
    usual = [record(arm, seed=seed) for seed in range(2) for arm in Arm]
    assert book_of(slow).num_void == 0
    book = book_of(slow, *usual)
    assert book.usual_gemm_s == (0.003, 0.004)
    assert [void is not None for _, void in book.judged()] == [True] + 6 * [False]


def test_resuming_with_other_settings_is_refused_with_the_setting() -> None:
    other = msgspec.structs.replace(empty_book(), seconds=30.0)
    with pytest.raises(ConfigError, match=r"seconds 60\.0, not 30\.0"):
        require_resumable(empty_book(), other)
    require_resumable(empty_book(), book_of(record(Arm.WHOLE)))


def test_prefills_that_were_measured_before_are_kept() -> None:
    book = empty_book().with_prefills({256: 9.0, 512: 1.0})
    assert book.reference.prefill_s == {256: 0.5, 512: 1.0}


def test_felt_of_a_refused_request_is_nothing_and_not_complete() -> None:
    whole, refused = felt((*drawn_requests(1), refused_request(1.0)))
    assert whole.complete and whole.ttft_s is not None and whole.worst_gap_s is not None
    assert (refused.ttft_s, refused.tpot_s, refused.worst_gap_s, refused.complete) == (None, None, None, False)


def test_effect_is_the_geometric_mean_of_ratios_of_blocks_that_both_arms_have() -> None:
    records = [record(Arm.WHOLE, seed=seed, itl_p99_s=0.4) for seed in range(4)]
    records += [record(Arm.APART, seed=0, itl_p99_s=0.1), record(Arm.APART, seed=1, itl_p99_s=0.4)]
    records += [record(Arm.APART, seed=2, stolen=0.5, itl_p99_s=9.0)]
    (row,) = [row for row in effects(book_of(*records).counted, [POINT]) if row.metric == "ITL p99"]
    assert (row.baseline_arm, row.arm, row.num_blocks) == (Arm.WHOLE, Arm.APART, 2)
    assert row.effect == pytest.approx(0.5)
    assert row.interval.low == pytest.approx(0.25)
    assert row.interval.high == pytest.approx(1.0)


def test_table_of_a_book_counts_void_runs_and_shows_each_pair() -> None:
    text = table(book_of(record(Arm.WHOLE), record(Arm.APART), record(Arm.CHUNKED, stolen=0.5)), [POINT])
    assert "256/64@0.5: 1.00 requests/s, 3 runs, 1 of them void" in text
    assert "B : A" in text
    assert re.search(r"ITL p99 .*1\.000 +\S+ to \S+, 1 +1\.000 +\S+ to \S+, 1\n", text)


def test_table_tells_effects_of_void_runs_apart() -> None:
    text = table(book_of(record(Arm.WHOLE), record(Arm.APART, stolen=0.5)), [POINT])
    assert re.search(r"ITL p99 .*1\.000 +\S+ to \S+, 1 +-\n", text)
