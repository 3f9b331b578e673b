"""scripts/setup on machines that lack something, imitated by a PATH that holds only what each test puts there."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PLAIN_TOOLS = ("cat", "cksum", "dirname", "env", "find", "id", "mkdir", "nproc", "rm", "sort", "tail")


class BareMachine:
    """A project with a PATH of its own."""

    def __init__(self, folder: Path) -> None:
        self.project = folder / "project"
        self.programs = folder / "bin"
        self.calls = folder / "calls"
        for name in ("native", "requirements", "scripts"):
            (self.project / name).mkdir(parents=True)
        self.programs.mkdir()
        for name in ("CMakeLists.txt", "pyproject.toml"):
            (self.project / name).touch()
        (self.project / "requirements" / "runtime.txt").touch()
        shutil.copy(ROOT / "scripts" / "setup", self.project / "scripts")
        for tool in PLAIN_TOOLS:
            (self.programs / tool).symlink_to(shutil.which(tool) or tool)

    def add_program(self, name: str, script: str = "") -> None:
        """A program that notes how it was called, then does what the shell lines say."""
        path = self.programs / name
        path.write_text(f'#!/bin/sh\necho "{name} $*" >>{self.calls}\n{script}\n')
        path.chmod(0o755)

    def add_build_tools(self) -> None:
        (self.programs / "python3").symlink_to(Path(sys.base_prefix) / "bin" / "python3")
        for name in ("g++", "cmake", "ninja"):
            self.add_program(name)

    def set_up(self, kind: str = "runtime") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.project / "scripts" / "setup", kind],
            env={"PATH": str(self.programs)},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )


@pytest.fixture
def machine(tmp_path: Path) -> BareMachine:
    return BareMachine(tmp_path)


def test_setup_without_apt_names_what_is_missing_in_one_line(machine: BareMachine) -> None:
    machine.add_build_tools()
    (machine.programs / "g++").unlink()
    finished = machine.set_up()
    assert finished.returncode == 2
    assert finished.stderr.splitlines()[-1].startswith("scripts/setup: missing: g++ pkg-config libfabric-dev")


@pytest.mark.skipif(os.getuid() != 0, reason="as another user, setup asks sudo")
def test_setup_whose_apt_fails_shows_the_end_of_its_log(machine: BareMachine) -> None:
    machine.add_build_tools()
    machine.add_program("apt-get", 'echo "no such mirror"; exit 100')
    finished = machine.set_up()
    assert finished.returncode == 1
    assert "failed: apt-get update" in finished.stderr
    assert "no such mirror" in finished.stderr


def test_setup_with_an_old_libfabric_says_its_version(machine: BareMachine) -> None:
    machine.add_build_tools()
    machine.add_program("pkg-config", "case $1 in --exists) exit 0 ;; --modversion) echo 1.11.0 ;; *) exit 1 ;; esac")
    finished = machine.set_up()
    assert finished.returncode == 2
    assert "libfabric 1.11.0 is too old: 1.17 or newer is needed" in finished.stderr


def test_setup_of_an_unknown_kind_prints_its_usage(machine: BareMachine) -> None:
    finished = machine.set_up("everything")
    assert finished.returncode == 2
    assert "usage: scripts/setup [runtime|dev]" in finished.stderr


def test_setup_of_a_finished_tree_calls_no_build_tool(machine: BareMachine) -> None:
    machine.add_build_tools()
    machine.add_program("pkg-config", "case $1 in --modversion) echo 1.17.0 ;; esac")
    for path in (".venv/bin/pip", ".venv/bin/python", ".venv/bin/pdserve", "src/pdserve/_fabric.so"):
        (machine.project / path).parent.mkdir(parents=True, exist_ok=True)
        (machine.project / path).write_text("#!/bin/sh\n")
        (machine.project / path).chmod(0o755)
    for name in ("build", "model"):
        (machine.project / "requirements" / f"{name}.txt").touch()
    first = machine.set_up()
    assert first.returncode == 0, first.stderr
    assert "[5/5] pdserve" in first.stderr
    machine.calls.unlink()
    second = machine.set_up()
    assert (second.returncode, second.stderr) == (0, "")
    assert not any(line.startswith(("cmake", "g++", "ninja")) for line in machine.calls.read_text().splitlines())
