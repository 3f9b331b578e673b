"""What the transfer benchmark makes of its measurements, with measurements that need no machine."""

import sys
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import pytest

from pdserve.bench.transfer import Comparison, Contender, Limit, Measure, PageRun, Pair, Skipped, sum_up
from pdserve.bench.transfer_fabric import PushRun, RankRegions
from pdserve.bench.transfer_planning import CHUNK_TOKENS, LAYOUTS, LongPrompt
from pdserve.bench.transfer_programs import measure_program
from pdserve.bench.transfer_shardings import SCENARIOS, Scenario
from pdserve.errors import InternalError
from pdserve.kv.layout import KvLayout
from pdserve.kv.shard import KvSharding
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


def comparison(limit: Measure = lambda run: 2.0) -> Comparison:
    return Comparison(limits={Limit.RAW_TCP: limit}, repetitions=2, on_run=lambda what: None)


def test_comparison_alternates_limit_and_contender() -> None:
    calls: list[str] = []

    def recorded(name: str) -> Measure:
        def measure(run: PageRun) -> float:
            assert run is RUN
            calls.append(name)
            return 2.0

        return measure

    (row,) = comparison(recorded("limit")).measure([contender(recorded("tcp"))], RUN, subject="16 KiB")
    assert calls == ["limit", "tcp", "limit", "tcp"]
    assert (row.provider, row.page_bytes, row.ratio, row.spread) == ("tcp", RUN.page_bytes, 1.0, 0.0)


def fail(run: PageRun) -> float:
    raise InternalError("the peer crashed")


def test_peer_that_fails_is_left_out_from_then_on_and_the_others_go_on() -> None:
    failing = Contender(provider="peer", limit=Limit.RAW_TCP, measure=fail, is_peer=True)
    healthy = Contender(provider="peer", limit=Limit.RAW_TCP, measure=lambda run: 1.0, is_peer=True)
    measured = comparison()
    assert [row.provider for row in measured.measure([failing, contender()], RUN, subject="")] == ["tcp"]
    assert measured.failures == {"peer": Skipped(provider="peer", reason="the peer crashed")}
    assert [row.provider for row in measured.measure([healthy, contender()], RUN, subject="")] == ["tcp"]


def test_own_contender_that_fails_ends_the_comparison() -> None:
    with pytest.raises(InternalError, match="crashed"):
        comparison().measure([contender(fail)], RUN, subject="")


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_scenario_writes_as_many_bytes_as_its_limit(scenario: Scenario) -> None:
    run = PushRun(provider="tcp", source=scenario.source, target=scenario.target, num_pages=7, num_rounds=1)
    assert run.num_writes == 7 * scenario.writes_per_page
    assert run.num_bytes == run.num_writes * scenario.run_bytes


def test_rank_regions_hold_heads_only_while_every_byte_is_right() -> None:
    layout = KvLayout(num_layers=2, num_kv_heads=4, head_dim=3, page_slots=2, dtype="float16")
    with closing(RankRegions(KvSharding(layout=layout, num_ranks=2), num_pages=3)) as regions:
        assert not regions.hold_heads()
        regions.fill_with_heads()
        assert regions.hold_heads()
        regions.clear()
        assert not regions.hold_heads()


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_long_prompt_is_cut_into_chunks_and_given_distinct_pages(layout: KvLayout) -> None:
    prompt = LongPrompt(layout=layout, num_tokens=1_000_000)
    chunks = list(prompt.chunks)
    assert len(chunks) == 123 and chunks[0] == (0, CHUNK_TOKENS) and chunks[-1][1] == 999_999
    assert all(before[1] == after[0] for before, after in pairwise(chunks))
    assert sorted(prompt.page_indices) == list(range(62_500))


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
