"""What the transfer benchmark makes of its measurements, with measurements that need no machine."""

import sys
from pathlib import Path

import pytest

from pdserve.bench.transfer import Configuration, Contender, Limit, Measure, PageRun, Pair, Session, Skipped, sum_up
from pdserve.bench.transfer_programs import measure_program
from pdserve.errors import InternalError
from pdserve.units import KIB

RUN = PageRun(page_bytes=16 * KIB, region_bytes=64 * KIB + 5, num_rounds=3)


def contender(measure: Measure = lambda run: 1.0) -> Contender:
    return Contender(provider="tcp", limit=Limit.RAW_TCP, measure=measure)


def program(tmp_path: Path, source: str) -> list[str]:
    path = tmp_path / "program.py"
    path.write_text(source)
    return [sys.executable, str(path)]


def test_run_over_uneven_region_counts_whole_pages_only() -> None:
    assert RUN.num_pages == 4
    assert RUN.num_bytes == 3 * 64 * KIB
    assert RUN.gb_per_s(elapsed_ns=RUN.num_bytes) == 1.0


def test_sum_up_of_noisy_pairs_takes_medians_and_ratio_spread() -> None:
    pairs = [
        Pair(gb_per_s=1.0, limit_gb_per_s=2.0),
        Pair(gb_per_s=3.0, limit_gb_per_s=4.0),
        Pair(gb_per_s=8.0, limit_gb_per_s=8.0),
    ]
    row = sum_up(contender(), page_bytes=4 * KIB, pairs=pairs)
    assert (row.gb_per_s, row.limit_gb_per_s, row.limit) == (3.0, 4.0, "raw_tcp")
    assert row.ratio == 0.75
    assert row.spread == pytest.approx((1.0 - 0.5) / 0.75)


def session(contenders: list[Contender], limit: Measure = lambda run: 2.0) -> Session:
    configuration = Configuration(page_bytes=(4096, 8192), region_bytes=65536, num_rounds=1, repetitions=2)
    return Session(
        contenders=contenders,
        limits={Limit.RAW_TCP: limit},
        configuration=configuration,
        on_run=lambda what: None,
    )


def test_session_over_page_sizes_alternates_limit_and_contender() -> None:
    calls: list[tuple[str, int]] = []

    def recorded(name: str) -> Measure:
        def measure(run: PageRun) -> float:
            calls.append((name, run.page_bytes))
            return 2.0

        return measure

    report = session([contender(recorded("tcp"))], recorded("limit")).measure(skipped=[])
    assert calls == [(name, size) for size in (4096, 8192) for _ in range(2) for name in ("limit", "tcp")]
    assert [(row.page_bytes, row.ratio, row.spread) for row in report.rows] == [(4096, 1.0, 0.0), (8192, 1.0, 0.0)]


def fail_at_8192(run: PageRun) -> float:
    if run.page_bytes == 8192:
        raise InternalError("the peer crashed")
    return 1.0


def test_peer_that_fails_is_left_out_and_the_others_go_on() -> None:
    peer = Contender(provider="peer", limit=Limit.RAW_TCP, measure=fail_at_8192, is_peer=True)
    absent = Skipped(provider="absent", reason="not installed")
    report = session([peer, contender()]).measure(skipped=[absent])
    assert [(row.provider, row.page_bytes) for row in report.rows] == [("peer", 4096), ("tcp", 4096), ("tcp", 8192)]
    assert report.skipped == (absent, Skipped(provider="peer", reason="the peer crashed"))


def test_own_contender_that_fails_ends_the_session() -> None:
    with pytest.raises(InternalError, match="crashed"):
        session([contender(fail_at_8192)]).measure(skipped=[])


def test_program_that_prints_noise_before_its_result_is_read(tmp_path: Path) -> None:
    source = """
import json, os, sys
print("starting")
page_bytes, region_bytes, rounds = (int(argument) for argument in sys.argv[1:])
elapsed_ns = 2 * region_bytes * rounds if os.environ["UCX_TLS"] == "tcp" else 1
result = {"name": "x", "page_bytes": page_bytes, "num_bytes": region_bytes * rounds, "elapsed_ns": elapsed_ns}
print(json.dumps(result))
"""
    assert measure_program(program(tmp_path, source), {"UCX_TLS": "tcp"}, RUN) == 0.5


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import sys; sys.exit('no luck')", "exit code 1: no luck"),
        ("print('{}')", "printed no result"),
        ("", "printed no result"),
    ],
)
def test_program_that_fails_raises_what_it_said(tmp_path: Path, source: str, reason: str) -> None:
    with pytest.raises(InternalError, match=reason):
        measure_program(program(tmp_path, source), {}, RUN)
