"""Processes and cores as they are read from `/proc`: of a folder that looks like it."""

import os
from pathlib import Path

from pdserve.bench.procfs import ProcessStat, core_ticks, descendants_of, process_stat, process_stats


def stat_of(parent_pid: int) -> ProcessStat:
    return ProcessStat(state="S", parent_pid=parent_pid, cpu_ticks=0)


def test_descendants_of_a_process_are_found_over_generations() -> None:
    stats = {pid: stat_of(parent_pid) for pid, parent_pid in ((5, 1), (7, 5), (6, 7), (8, 1), (9, 5))}
    assert descendants_of(5, stats) == [6, 7, 9]
    assert descendants_of(8, stats) == []


def test_stat_of_a_process_with_a_strange_name_is_read_behind_it(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "stat").write_text(f"7 (a) (b c) T 5 {'0 ' * 9}1 2 3 4 {'0 ' * 10}\n")
    assert process_stat(7, proc=tmp_path) == ProcessStat(state="T", parent_pid=5, cpu_ticks=10)
    assert process_stat(8, proc=tmp_path) is None
    assert process_stats(proc=tmp_path).keys() == {7}


def test_stat_of_this_process_names_its_parent() -> None:
    assert process_stats()[os.getpid()].parent_pid == os.getppid()


def test_ticks_of_a_machine_without_the_counters_are_not_told(tmp_path: Path) -> None:
    assert core_ticks(proc=tmp_path) is None
