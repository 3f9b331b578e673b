"""Directories that are made once: by whom, and what is there of one that could not be made."""

import multiprocessing
from collections.abc import Callable
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest

from pdserve.errors import ConfigError
from pdserve.model.prepared import prepared_dir

NUM_PROCESSES = 2
DEADLINE_S = 60.0


@pytest.fixture(name="models_dir")
def fresh_models_dir(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("PDSERVE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


def writing(text: str, log: Path | None = None) -> Callable[[Path], None]:
    def fill(model_dir: Path) -> None:
        (model_dir / "weights").write_text(text)
        if log is not None:
            with log.open("a") as file:
                file.write("filled\n")

    return fill


def failing(model_dir: Path) -> None:
    (model_dir / "half").write_text("of it")
    raise ConfigError("no such weights")


def prepare_with_others(barrier: Barrier, found: "Queue[str]", log: Path) -> None:
    """The environment is that of the process that started this one."""
    barrier.wait(DEADLINE_S)
    found.put(str(prepared_dir("model", recipe={"version": 1}, fill=writing("whole", log))))


def test_directory_prepared_by_two_processes_at_once_is_made_once(models_dir: Path, tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    barrier, found, log = context.Barrier(NUM_PROCESSES), context.Queue(), tmp_path / "log"
    processes = [
        context.Process(target=prepare_with_others, args=(barrier, found, log), daemon=True)
        for _ in range(NUM_PROCESSES)
    ]
    for process in processes:
        process.start()
    assert {found.get(timeout=DEADLINE_S) for _ in processes} == {str(models_dir / "model")}
    for process in processes:
        process.join(DEADLINE_S)

    assert log.read_text() == "filled\n"
    assert sorted(path.name for path in models_dir.iterdir()) == [".model.lock", "model"]
    assert (models_dir / "model" / "weights").read_text() == "whole"


def test_directory_that_is_there_is_not_made_again_but_for_another_recipe(models_dir: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    for version, text in ((1, "first"), (1, "second"), (2, "third"), (2, "fourth")):
        prepared_dir("model", recipe={"version": version}, fill=writing(text, log))
    assert log.read_text() == 2 * "filled\n"
    assert (models_dir / "model" / "weights").read_text() == "third"


def test_directory_that_could_not_be_made_is_not_there_and_can_be_made_later(models_dir: Path) -> None:
    with pytest.raises(ConfigError, match="no such weights"):
        prepared_dir("model", recipe={"version": 1}, fill=failing)
    assert [path.name for path in models_dir.iterdir()] == [".model.lock"]

    model_dir = prepared_dir("model", recipe={"version": 1}, fill=writing("whole"))
    assert sorted(path.name for path in model_dir.iterdir()) == ["conversion.json", "weights"]
