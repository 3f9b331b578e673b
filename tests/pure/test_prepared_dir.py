"""Directories that are made once: by whom, and what is there of one that could not be made."""

import asyncio
import fcntl
import multiprocessing
from collections.abc import Callable
from multiprocessing.context import SpawnProcess
from multiprocessing.queues import Queue
from pathlib import Path

import pytest

from pdserve.bench.waiting import until
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


def prepare(found: "Queue[str]", log: Path) -> None:
    """The environment is that of the process that started this one."""
    found.put(str(prepared_dir("model", recipe={"version": 1}, fill=writing("whole", log))))


def has_open(process: SpawnProcess, path: Path) -> bool:
    try:
        return any(each.resolve() == path for each in Path(f"/proc/{process.pid}/fd").iterdir())
    except FileNotFoundError:
        return False


def test_directory_prepared_by_two_processes_at_once_is_made_once(models_dir: Path, tmp_path: Path) -> None:
    """Both find that it is missing, while we hold the lock that they then wait for."""
    context = multiprocessing.get_context("spawn")
    found, log, lock = context.Queue(), tmp_path / "log", models_dir / ".model.lock"
    processes = [context.Process(target=prepare, args=(found, log), daemon=True) for _ in range(NUM_PROCESSES)]

    async def num_waiting() -> int:
        return sum(has_open(process, lock) for process in processes)

    models_dir.mkdir(parents=True)
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        for process in processes:
            process.start()
        asyncio.run(until(num_waiting, lambda count: count == NUM_PROCESSES, timeout_s=DEADLINE_S))
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
