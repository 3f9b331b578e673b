"""`pdserve bench-transfer` as it runs: limits in C, both providers, two processes; too small to judge speed."""

import argparse
import json
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from pdserve.bench import transfer_programs
from pdserve.bench.transfer import Comparison, PageRun
from pdserve.bench.transfer_fabric import PROVIDERS, measure_pages
from pdserve.bench.transfer_planning import PlanningRow
from pdserve.bench.transfer_report import Report
from pdserve.bench.transfer_shardings import PushRow, measure_pushes
from pdserve.cli import bench_transfer
from pdserve.cli.transfer_table import format_report
from pdserve.errors import ConfigError
from pdserve.units import KIB, MIB

TINY = ["--pages", "16K,64K", "--region", "1M", "--rounds", "1", "--repetitions", "1"]


@pytest.fixture(autouse=True)
def no_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer_programs, "PEERS", ())


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(exit_on_error=False)
    bench_transfer.add_parser(parser.add_subparsers())
    return parser.parse_args(["bench-transfer", *arguments])


def test_bench_transfer_prints_one_document_or_its_tables(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_transfer.run(parse("--json", *TINY)) == 0
    printed = capsys.readouterr().out
    require_pages(json.loads(printed))
    report = msgspec.json.decode(printed, type=Report)
    require_pushes(report.pushes)
    require_planning(report.planning)
    tables = [table.splitlines() for table in format_report(report).split("\n\n")]
    assert [len(lines) for lines in tables] == [6, 2 + len(report.pushes), 2 + len(report.planning), 2]
    assert [line.split()[2] for line in tables[0][2:]] == ["tcp", "shm", "tcp", "shm"]
    assert "1 MiB in random pages" in tables[3][0]
    assert max(len(line) for lines in tables[:3] for line in lines) <= 100


def require_pages(document: dict[str, Any]) -> None:
    assert [(row["provider"], row["page_bytes"], row["limit"]) for row in document["rows"]] == [
        (provider, page_bytes, limit)
        for page_bytes in (16 * KIB, 64 * KIB)
        for provider, limit in (("tcp", "raw_tcp"), ("shm", "process_vm_writev"))
    ]
    for row in document["rows"]:
        assert set(row) == {"provider", "page_bytes", "gb_per_s", "limit", "limit_gb_per_s", "ratio", "spread"}
        assert row["gb_per_s"] > 0 and row["limit_gb_per_s"] > 0 and row["ratio"] > 0
    assert document["configuration"]["repetitions"] == 1
    assert document["machine"]["num_cpus"] >= 1


def require_pushes(rows: Sequence[PushRow]) -> None:
    both = [
        (cache, source_ranks, target_ranks, 1, provider, writes_per_page)
        for cache, source_ranks, target_ranks, writes_per_page in (
            ("GQA", 1, 1, 1),
            ("GQA", 3, 3, 3),
            ("GQA", 3, 1, 3),
            ("GQA", 1, 3, 3),
            ("MLA", 4, 4, 4),
            ("MLA", 4, 1, 1),
        )
        for provider in ("tcp", "shm")
    ]
    assert [
        (row.cache, row.source_ranks, row.target_ranks, row.num_nics, row.provider, row.writes_per_page) for row in rows
    ] == [*both, ("GQA", 3, 3, 2, "tcp", 3)]
    for row in rows:
        assert row.limit_gb_per_s > 0 and row.ratio > 0
        assert row.pages_per_s * row.writes_per_page * row.run_bytes == pytest.approx(row.gb_per_s * 1e9)


def require_planning(rows: Sequence[PlanningRow]) -> None:
    assert [(row.cache, row.num_tokens, row.num_pages, row.num_layers) for row in rows] == [
        ("GQA", 1_000_000, 62_500, 61),
        ("MLA", 1_000_000, 62_500, 61),
    ]
    for row in rows:
        assert row.num_writes == 8 * 61 * 62_500 + 1
        assert row.first_chunk_ms > 0 and 0 < row.chunk_ms_p50 <= row.chunk_ms_max
        # One object a page and layer would be hundreds of MiB.
        assert 0 < row.first_chunk_peak_bytes <= row.peak_bytes < 4 * MIB


@pytest.mark.parametrize("provider", PROVIDERS)
def test_fabric_run_with_uneven_pages_lands_every_byte(provider: str) -> None:
    assert measure_pages(provider, PageRun(page_bytes=24_576, region_bytes=MIB, num_rounds=2)) > 0


def test_page_larger_than_the_region_is_refused_before_measuring() -> None:
    with pytest.raises(ConfigError, match="--region"):
        bench_transfer.run(parse("--pages", "1M", "--region", "64K"))


def test_region_without_pages_for_every_layer_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 4 pages"):
        measure_pages("tcp", PageRun(page_bytes=64 * KIB, region_bytes=128 * KIB, num_rounds=1))


def test_page_of_odd_bytes_is_refused() -> None:
    with pytest.raises(ConfigError, match="no whole number"):
        measure_pages("tcp", PageRun(page_bytes=4097, region_bytes=MIB, num_rounds=1))


def test_region_smaller_than_the_writes_of_a_page_is_refused() -> None:
    compared = Comparison(limits={}, repetitions=1, on_run=lambda what: None)
    with pytest.raises(ConfigError, match="--region"):
        list(measure_pushes(compared, region_bytes=16 * KIB, num_rounds=1))


@pytest.mark.parametrize(
    "arguments", [["--pages", "16X"], ["--pages", "0"], ["--repetitions", "0"], ["--region", "-1"]]
)
def test_argument_that_is_no_positive_number_is_refused(arguments: list[str]) -> None:
    with pytest.raises((argparse.ArgumentError, SystemExit)):
        parse(*arguments)
