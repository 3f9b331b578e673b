"""`pdserve topology` as an operator runs it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

TREES = Path(__file__).parents[1] / "recorded_sysfs"


def topology(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pdserve", "topology", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("name", ["hgx_h100", "p5_efa", "laptop"])
def test_topology_of_a_recorded_tree_prints_the_golden_report(name: str) -> None:
    shown = topology("--sysfs", str(TREES / name))
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.splitlines()[1:] == (TREES / f"{name}.txt").read_text().splitlines()[1:]


def test_topology_of_this_machine_prints_a_plan() -> None:
    shown = topology()
    assert shown.returncode == 0, shown.stderr
    assert "Plan: provider " in shown.stdout
    assert "What looks wrong" in shown.stdout


def test_topology_as_json_has_the_plan_as_values() -> None:
    shown = json.loads(topology("--json", "--sysfs", str(TREES / "hgx_h100")).stdout)
    assert shown["plan"]["provider"] == "verbs"
    assert shown["gpus"][0]["distances"]["mlx5_0"] == "PXB"
    assert shown["plan"]["groups"][0] == {"nics": ["mlx5_0"], "addresses": [None], "cpus": [52, 164]}
    assert shown["findings"] == []


def test_topology_of_a_folder_that_is_no_sysfs_says_so_in_one_line(tmp_path: Path) -> None:
    shown = topology("--sysfs", str(tmp_path))
    assert shown.returncode == 2
    assert shown.stdout == ""
    (line,) = shown.stderr.splitlines()
    assert line.startswith(f"pdserve topology: {tmp_path} is no sysfs")
