"""`pdserve bench-transfer` as it runs: limits in C, both providers, two processes; too small to judge speed."""

import argparse
import json

import pytest

from pdserve.bench import transfer_programs
from pdserve.bench.transfer import PageRun
from pdserve.bench.transfer_fabric import PROVIDERS, measure_fabric
from pdserve.cli import bench_transfer
from pdserve.errors import ConfigError
from pdserve.units import KIB, MIB

TINY = ["--pages", "16K,64K", "--region", "1M", "--rounds", "1", "--repetitions", "2"]


@pytest.fixture(autouse=True)
def no_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer_programs, "PEERS", ())


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(exit_on_error=False)
    bench_transfer.add_parser(parser.add_subparsers())
    return parser.parse_args(["bench-transfer", *arguments])


def test_bench_transfer_with_json_prints_one_document_of_rows(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_transfer.run(parse("--json", *TINY)) == 0
    document = json.loads(capsys.readouterr().out)
    assert [(row["provider"], row["page_bytes"], row["limit"]) for row in document["rows"]] == [
        (provider, page_bytes, limit)
        for page_bytes in (16 * KIB, 64 * KIB)
        for provider, limit in (("tcp", "raw_tcp"), ("shm", "process_vm_writev"))
    ]
    for row in document["rows"]:
        assert set(row) == {"provider", "page_bytes", "gb_per_s", "limit", "limit_gb_per_s", "ratio", "spread"}
        assert row["gb_per_s"] > 0 and row["limit_gb_per_s"] > 0 and row["ratio"] > 0
    assert document["configuration"]["repetitions"] == 2
    assert document["machine"]["num_cpus"] >= 1


def test_bench_transfer_without_json_prints_a_line_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_transfer.run(parse(*TINY)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[2] for line in lines[1:5]] == ["tcp", "shm", "tcp", "shm"]
    assert "1 MiB in random pages" in lines[6]


@pytest.mark.parametrize("provider", PROVIDERS)
def test_fabric_run_with_uneven_pages_lands_every_byte(provider: str) -> None:
    assert measure_fabric(provider, PageRun(page_bytes=24_576, region_bytes=MIB, num_rounds=2)) > 0


def test_page_larger_than_the_region_is_refused_before_measuring() -> None:
    with pytest.raises(ConfigError, match="--region"):
        bench_transfer.run(parse("--pages", "1M", "--region", "64K"))


def test_region_without_pages_for_every_layer_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 4 pages"):
        measure_fabric("tcp", PageRun(page_bytes=64 * KIB, region_bytes=128 * KIB, num_rounds=1))


@pytest.mark.parametrize(
    "arguments", [["--pages", "16X"], ["--pages", "0"], ["--repetitions", "0"], ["--region", "-1"]]
)
def test_argument_that_is_no_positive_number_is_refused(arguments: list[str]) -> None:
    with pytest.raises((argparse.ArgumentError, SystemExit)):
        parse(*arguments)
