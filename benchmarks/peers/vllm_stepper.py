"""The program `vllm_steps.py` as a child process."""

import asyncio
import contextlib
import os
import signal
from pathlib import Path

import msgspec
from vllm_server import FOLDER, LOGS, last_error

from pdserve.bench.engine import Point
from pdserve.config.environment import child_environment
from pdserve.errors import InternalError

DEADLINE_S = 900.0
"""Of an answer, the first of which may wait for kernels to be compiled."""


class Steps(msgspec.Struct, frozen=True):
    seconds: float
    """Mean of a step."""
    context: int
    """Tokens before the step, on average."""


class _Ready(msgspec.Struct, frozen=True):
    ready: str
    configuration: str


class VllmStepper:
    """Lifetime: `close` must be called."""

    def __init__(self, process: asyncio.subprocess.Process, log_path: Path) -> None:
        self._process = process
        self._log_path = log_path
        self.version = ""
        self.configuration = ""

    @classmethod
    async def start(cls, model_dir: Path, *, cpu: int) -> "VllmStepper":
        """Raises: `InternalError` when it does not start."""
        LOGS.mkdir(exist_ok=True)
        log_path = LOGS / "engine.log"
        with log_path.open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                FOLDER / ".venv" / "bin" / "python",
                FOLDER / "vllm_steps.py",
                *(str(model_dir), str(cpu)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env=child_environment(OMP_NUM_THREADS="1", LD_PRELOAD=await _preloads()),
                process_group=0,
            )
        stepper = cls(process, log_path)
        try:
            ready = msgspec.json.decode(await stepper._answer(), type=_Ready)
        except BaseException:
            await stepper.close()
            raise
        stepper.version, stepper.configuration = ready.ready, ready.configuration
        return stepper

    async def measure(self, point: Point) -> Steps:
        if self._process.stdin is None:
            raise InternalError("vLLM's program has no standard input")
        self._process.stdin.write(msgspec.json.encode(point) + b"\n")
        return msgspec.json.decode(await self._answer(), type=Steps)

    async def _answer(self) -> bytes:
        if self._process.stdout is None:
            raise InternalError("vLLM's program has no standard output")
        try:
            line = await asyncio.wait_for(self._process.stdout.readline(), DEADLINE_S)
        except TimeoutError:
            raise InternalError(f"vLLM did not answer within {DEADLINE_S:.0f} s; see {self._log_path}") from None
        if not line:
            status = await self._process.wait()
            raise InternalError(
                f"vLLM ended with exit status {status}: {last_error(self._log_path)}; see {self._log_path}"
            )
        return line

    async def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()


async def _preloads() -> str:
    process = await asyncio.create_subprocess_exec(FOLDER / "preloads", stdout=asyncio.subprocess.PIPE)
    output, _ = await process.communicate()
    return output.decode().strip()
