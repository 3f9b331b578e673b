"""Shares of a run from two readings of the kernel's counters."""

from dataclasses import replace
from pathlib import Path

import pytest

from pdserve.bench.load.disturbance import disturbance_between, read_counters

BEFORE = "cpu  100 0 50 800 10 5 5 30 0 0\ncpu0 1 1 1 1 1 1 1 1 0 0\nintr 1 2\n"
AFTER = "cpu  140 0 60 830 10 5 5 50 0 0\ncpu0 1 1 1 1 1 1 1 1 0 0\nintr 1 2\n"
PRESSURE = "some avg10=0.00 avg60=0.00 avg300=0.00 total={}\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=7\n"


def test_shares_between_two_readings_are_those_of_the_time_between(tmp_path: Path) -> None:
    stat, pressure = tmp_path / "stat", tmp_path / "pressure" / "cpu"
    pressure.parent.mkdir()
    stat.write_text(BEFORE)
    pressure.write_text(PRESSURE.format(1_000_000))
    before = read_counters(proc=tmp_path)
    stat.write_text(AFTER)
    pressure.write_text(PRESSURE.format(1_500_000))
    after = read_counters(proc=tmp_path)
    after = replace(after, instant_s=before.instant_s + 2.0, own_cpu_s=before.own_cpu_s + 0.5)
    found = disturbance_between(before, after)
    assert (found.steal_share, found.psi_cpu_share) == (0.2, 0.25)
    assert found.busy_share == pytest.approx(0.7)
    assert found.generator_cpu_s == pytest.approx(0.5)


def test_machine_without_the_counters_has_no_shares(tmp_path: Path) -> None:
    before, after = (read_counters(proc=tmp_path) for _ in range(2))
    found = disturbance_between(before, after)
    assert (found.steal_share, found.psi_cpu_share, found.busy_share) == (None, None, None)


def test_counters_of_this_machine_are_read_as_they_are() -> None:
    found = disturbance_between(read_counters(), read_counters())
    assert found.steal_share is None or 0 <= found.steal_share <= 1
    assert found.busy_share is None or 0 <= found.busy_share <= 1
