"""The engine's benchmark on a tiny checkpoint, with all its processes; no conclusions from its figures."""

from pathlib import Path

import pytest
from tests.pure.tiny_checkpoints import write_checkpoint

from pdserve.bench.engine import Phase, Point, run_engine_bench, sum_up

DECODE = Point(phase=Phase.DECODE, batch=2, context=20, steps=2)


async def test_bench_of_a_tiny_model_has_a_row_a_point_with_all_figures(tmp_path: Path) -> None:
    write_checkpoint("llama", tmp_path)
    prefill = Point(phase=Phase.PREFILL, batch=1, context=40, steps=1)
    runs: list[str] = []
    report = await run_engine_bench(tmp_path, cpu=0, points=(prefill, DECODE), repetitions=2, on_run=runs.append)
    assert [(row.phase, row.batch, row.context) for row in report.rows] == [
        (Phase.PREFILL, 1, 40),
        (Phase.DECODE, 2, 20),
    ]
    for row in report.rows:
        assert row.tokens_per_s > 0
        assert row.ratio is not None
        assert row.limit_ratio is not None
    assert report.skipped == ()
    assert len(runs) == 2 * 2 * 3


def test_sum_of_repetitions_pairs_each_with_its_neighbour() -> None:
    row = sum_up(DECODE, {"pdserve": [10.0, 20.0, 30.0], "transformers": [10.0, 10.0, 30.0]})
    assert (row.tokens_per_s, row.ratio, row.limit_ratio) == (20.0, 1.0, None)
    assert row.spread == pytest.approx(1.0)
