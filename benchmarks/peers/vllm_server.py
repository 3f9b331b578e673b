"""vLLM as a server on one core, started by `serve` and stopped whole."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp

from pdserve.errors import ConfigError
from pdserve.launch.deployment import require_free_port

FOLDER = Path(__file__).parent
LOGS = FOLDER / ".venv" / "logs"
START_TIMEOUT_S = 1200.0
"""The first time it compiles kernels, for minutes on a busy core; later it finds them in its cache."""
STOP_TIMEOUT_S = 30.0
POLL_S = 0.5


def require_installed() -> None:
    """Raises: `ConfigError`."""
    if not (FOLDER / ".venv" / "bin" / "python").exists():
        raise ConfigError(f"vLLM is not installed: run {FOLDER / 'setup'} before")


class VllmServer:
    def __init__(self, process: asyncio.subprocess.Process, url: str, log_path: Path) -> None:
        self.process = process
        self.url = url
        self._log_path = log_path

    async def wait_healthy(self) -> None:
        """Raises: `ConfigError` when the server ends, or is not ready in time."""
        try:
            async with asyncio.timeout(START_TIMEOUT_S), aiohttp.ClientSession() as session:
                while self.process.returncode is None:
                    if await self._is_healthy(session):
                        return
                    await asyncio.sleep(POLL_S)
        except TimeoutError as error:
            raise ConfigError(f"vLLM was not ready within {START_TIMEOUT_S:g} s; see {self._log_path}") from error
        status, said = self.process.returncode, last_error(self._log_path)
        raise ConfigError(f"vLLM ended with exit status {status}: {said}; see {self._log_path}")

    async def _is_healthy(self, session: aiohttp.ClientSession) -> bool:
        try:
            async with session.get(f"{self.url}/health") as response:
                return response.status == 200
        except aiohttp.ClientError:
            return False

    async def stop(self) -> None:
        """Ask the server, which asks its engine and worker processes; then make sure of all of them."""
        if self.process.returncode is None:
            self.process.terminate()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.process.wait(), STOP_TIMEOUT_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        await self.process.wait()


@asynccontextmanager
async def vllm_server(cpu: int, flags: Sequence[str] = (), *, name: str) -> AsyncGenerator[VllmServer]:
    """Begun, and not yet ready; `name` is of its log."""
    port = require_free_port("127.0.0.1", 0)
    LOGS.mkdir(exist_ok=True)
    log_path = LOGS / f"{name}.log"
    with log_path.open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            FOLDER / "serve",
            *(str(cpu), str(port), *flags),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            process_group=0,
        )
    server = VllmServer(process, f"http://127.0.0.1:{port}", log_path)
    try:
        yield server
    finally:
        await server.stop()


def last_error(log_path: Path) -> str:
    """The last line that names an error, for the reader of a report."""
    lines = [line.strip() for line in log_path.read_text(errors="replace").splitlines() if "Error" in line]
    return lines[-1][-300:] if lines else "it wrote no error"
