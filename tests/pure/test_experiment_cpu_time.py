"""Shares of CPU time from files of /proc: ours, other processes', the hypervisor's."""

import os
from pathlib import Path

import pytest

from pdserve.bench.experiment.cpu_time import CpuTimes, cpu_times, shares

TICKS = os.sysconf("SC_CLK_TCK")


def write_process(proc: Path, pid: int, *, parent: int, ticks: int, name: str = "python") -> None:
    (proc / str(pid)).mkdir()
    fields = ["S", str(parent), *["0"] * 9, str(ticks), "0", "0", "0", *["0"] * 10]
    (proc / str(pid) / "stat").write_text(f"{pid} ({name}) {' '.join(fields)}\n")


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    user, idle, steal = 60 * TICKS, 30 * TICKS, 10 * TICKS
    (tmp_path / "stat").write_text(f"cpu  {user} 0 0 {idle} 0 0 0 {steal} 5 0\ncpu0 1 2\n")
    (tmp_path / "pressure").mkdir()
    (tmp_path / "pressure" / "cpu").write_text("some avg10=0.00 avg60=0.00 avg300=0.00 total=2500000\nfull x\n")
    write_process(tmp_path, 1, parent=0, ticks=TICKS)
    write_process(tmp_path, 10, parent=1, ticks=2 * TICKS)
    write_process(tmp_path, 11, parent=10, ticks=3 * TICKS, name="a (strange) name")
    write_process(tmp_path, 12, parent=11, ticks=4 * TICKS)
    write_process(tmp_path, 20, parent=1, ticks=50 * TICKS)
    (tmp_path / "self").mkdir()
    return tmp_path


def test_reading_of_proc_sums_our_process_and_its_descendants(proc: Path) -> None:
    times = cpu_times(proc, own_pid=10)
    assert (times.wall_s, times.busy_s, times.steal_s) == (100.0, 60.0, 10.0)
    assert times.own_s == 2 + 3 + 4
    assert times.psi_s == 2.5


def test_kernel_without_pressure_figures_tells_none(proc: Path) -> None:
    (proc / "pressure" / "cpu").unlink()
    assert cpu_times(proc, own_pid=10).psi_s is None


def test_reading_of_this_machine_grows_with_its_clock() -> None:
    before = cpu_times()
    after = cpu_times()
    assert after.wall_s >= before.wall_s > 0
    assert after.own_s >= before.own_s > 0


def test_shares_between_two_readings_divide_the_time_of_all_cores() -> None:
    before = CpuTimes(wall_s=100.0, busy_s=50.0, steal_s=1.0, own_s=20.0, psi_s=3.0)
    after = CpuTimes(wall_s=120.0, busy_s=66.0, steal_s=2.0, own_s=34.0, psi_s=8.0)
    found = shares(before, after, num_cpus=2)
    assert (found.steal, found.foreign, found.own) == pytest.approx((0.05, 0.1, 0.7))
    assert found.psi == pytest.approx(0.5)


def test_shares_of_ticks_counted_at_different_moments_are_not_negative() -> None:
    before = CpuTimes(wall_s=100.0, busy_s=50.0, steal_s=1.0, own_s=20.0, psi_s=None)
    after = CpuTimes(wall_s=101.0, busy_s=50.5, steal_s=1.0, own_s=20.51, psi_s=None)
    assert shares(before, after, num_cpus=2).foreign == 0.0
