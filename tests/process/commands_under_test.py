"""`pdserve` commands as child processes, and a cluster of them whose workers come and go."""

import asyncio
import os
import signal
import sys
import uuid
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from tests.process.deployment_under_test import SECRET, WORKER_FLAGS, Running, connected, is_idle
from tests.process.gateway_under_test import until

from pdserve.config.environment import child_environment
from pdserve.config.role import Role
from pdserve.launch.deployment import require_free_port
from pdserve.model.source import ModelSource

MARK = "PDSERVE_TESTS_COMMAND"
"""An environment variable that every descendant of a command inherits, whoever its parent is by then."""

START_TIMEOUT_S = 90.0
END_TIMEOUT_S = 10.0


class Command:
    """One command in a session of its own, with its output in files. Lifetime: `end` must be called."""

    def __init__(self, process: asyncio.subprocess.Process, output: Path, mark: str) -> None:
        self.process = process
        self._output = output
        self._mark = f"{MARK}={mark}".encode()

    @classmethod
    async def start(cls, folder: Path, *arguments: str, environment: Mapping[str, str] | None = None) -> "Command":
        mark = uuid.uuid4().hex
        output = folder / mark
        with output.with_suffix(".out").open("w") as stdout, output.with_suffix(".err").open("w") as stderr:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "pdserve", *arguments),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                env=child_environment(**{MARK: mark, **(environment or {})}),
                start_new_session=True,
            )
        return cls(process, output, mark)

    @property
    def stdout(self) -> str:
        return self._output.with_suffix(".out").read_text()

    @property
    def stderr(self) -> str:
        return self._output.with_suffix(".err").read_text()

    @property
    def is_running(self) -> bool:
        return self.process.returncode is None

    async def wait(self, *, timeout_s: float = END_TIMEOUT_S) -> int:
        """The exit status. Raises: `TimeoutError`."""
        async with asyncio.timeout(timeout_s):
            return await self.process.wait()

    async def until_says(self, words: str, *, timeout_s: float = END_TIMEOUT_S) -> None:
        """Wait until the command has printed these words. Raises: `AssertionError` when it ends without, or in time."""

        async def said() -> bool:
            return words in self.stdout + self.stderr or not self.is_running

        await until(said, bool, timeout_s=timeout_s)
        assert words in self.stdout + self.stderr, self.stderr

    def descendants(self) -> list[int]:
        """Processes that came of this command and run still, the command's own included."""
        return [int(entry.name) for entry in Path("/proc").glob("[0-9]*") if self._mark in _environment(entry)]

    async def kill(self) -> None:
        """End the command's own process as the kernel would: without a word."""
        self.process.kill()
        await self.process.wait()

    async def until_gone(self) -> None:
        """Wait until no process of the command is left. Raises: `TimeoutError`."""
        await until(partial(asyncio.to_thread, self.descendants), lambda pids: not pids, timeout_s=END_TIMEOUT_S)

    async def end(self) -> None:
        for pid in self.descendants():
            os.kill(pid, signal.SIGKILL)
        await self.process.wait()
        await self.until_gone()


def _environment(entry: Path) -> list[bytes]:
    """Of a process; empty for one that ended or is not ours."""
    try:
        return (entry / "environ").read_bytes().split(b"\0")
    except OSError:
        return []


class Cluster:
    """A gateway, and the workers that a test wants."""

    def __init__(self, model: ModelSource, folder: Path, running: Running) -> None:
        self.running = running
        self._model = model
        self._folder = folder
        self._workers: dict[str, Command] = {}

    def worker(self, name: str) -> Command:
        return self._workers[name]

    async def start_worker(self, name: str, role: Role, *flags: str) -> Command:
        which = ("--role", role.value, "--name", name, "--join", self.running.url)
        arguments = ("worker", str(self._model.dir), *which, *WORKER_FLAGS)
        self._workers[name] = await Command.start(
            self._folder, *arguments, *flags, environment={"PDSERVE_CLUSTER_SECRET": SECRET}
        )
        return self._workers[name]

    async def require(self, **roles: Role) -> None:
        """Have exactly these workers, idle and connected with each other, starting only those that are not there."""
        for name, command in list(self._workers.items()):
            if name not in roles or not command.is_running:
                await self._workers.pop(name).end()
        for name, role in roles.items():
            if name not in self._workers:
                await self.start_worker(name, role)
        num_prefill = sum(role is Role.PREFILL for role in roles.values())

        def is_complete(workers: dict[str, dict[str, Any]]) -> bool:
            return workers.keys() == roles.keys() and all(
                all(map(is_idle, worker["ranks"]))
                and worker["num_prefill_peers"] == (num_prefill if roles[name] is Role.DECODE else 0)
                for name, worker in workers.items()
            )

        try:
            await until(self.running.workers, is_complete, timeout_s=START_TIMEOUT_S)
        except TimeoutError as error:
            said = {name: command.stderr[-2000:] for name, command in self._workers.items()}
            raise AssertionError(f"{await self.running.workers()} is not {roles}; they said {said}") from error

    async def until_left(self, name: str, *, timeout_s: float) -> None:
        """Wait until the gateway has noticed that a worker is gone."""
        await until(self.running.workers, lambda workers: name not in workers, timeout_s=timeout_s)

    async def end(self) -> None:
        for command in self._workers.values():
            await command.end()


@asynccontextmanager
async def cluster(model: ModelSource, folder: Path) -> AsyncGenerator[Cluster]:
    """A gateway without workers; whatever was started is gone at the end."""
    port = require_free_port("127.0.0.1", 0)
    gateway = await Command.start(
        folder, "gateway", str(model.dir), "--port", str(port), environment={"PDSERVE_CLUSTER_SECRET": SECRET}
    )
    try:
        async with connected(f"http://127.0.0.1:{port}") as running:
            started = Cluster(model, folder, running)
            await until(lambda: _listens(port), bool, timeout_s=START_TIMEOUT_S)
            try:
                yield started
            finally:
                await started.end()
    finally:
        await gateway.end()


async def _listens(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    return True
