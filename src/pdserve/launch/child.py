"""One child process: started, known to be ready, stopped for certain."""

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Sequence

from pdserve.config.environment import child_environment
from pdserve.errors import ConfigError

READY_LINE = b"ready\n"
PR_SET_PDEATHSIG = 1


def report_ready(ready_fd: int | None) -> None:
    """Called in the child: tell the parent that this process serves now. Later calls do nothing."""
    if ready_fd is None:
        return
    try:
        os.write(ready_fd, READY_LINE)
    except OSError:
        return  # the parent waits no longer


def _die_with_parent() -> None:
    """Between fork and exec: SIGTERM when the parent dies however it dies, so no worker is ever left behind."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


class Child:
    """A `pdserve` subcommand as a child process. Lifetime: `stop` must be called."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, ready_fd: int) -> None:
        self.name = name
        self.process = process
        self._ready_fd = ready_fd

    @classmethod
    async def start(
        cls,
        name: str,
        arguments: Sequence[str],
        *,
        environment: dict[str, str] | None = None,
        wrapper: Sequence[str] = (),
    ) -> "Child":
        """`python -m pdserve ARGUMENTS --ready-fd N`, in its own process group: Ctrl-C reaches only the parent.

        `wrapper` is a command that becomes the one after it, such as `ip netns exec NAME`.
        """
        ready_read, ready_write = os.pipe()
        os.set_blocking(ready_read, False)
        process = await asyncio.create_subprocess_exec(
            *wrapper,
            sys.executable,
            "-m",
            "pdserve",
            *arguments,
            "--ready-fd",
            str(ready_write),
            stdin=asyncio.subprocess.DEVNULL,
            pass_fds=(ready_write,),
            env=child_environment(**(environment or {})),
            preexec_fn=_die_with_parent,
            process_group=0,
        )
        os.close(ready_write)
        return cls(name, process, ready_read)

    async def wait_ready(self, *, timeout_s: float) -> None:
        """Raises: `ConfigError` when the process ends, or is not ready in time; it has said why on stderr."""
        loop = asyncio.get_running_loop()
        readable = asyncio.Event()
        loop.add_reader(self._ready_fd, readable.set)
        try:
            async with asyncio.timeout(timeout_s):
                await readable.wait()
            if os.read(self._ready_fd, len(READY_LINE)) != READY_LINE:
                status = await self.process.wait()
                raise ConfigError(f"{self.name} did not start (exit status {status}); see its message above")
        except TimeoutError as error:
            raise ConfigError(f"{self.name} was not ready within {timeout_s:g} s") from error
        finally:
            loop.remove_reader(self._ready_fd)

    def signal(self, number: signal.Signals) -> None:
        # `Process.send_signal` may reap a child that has ended, and then asyncio never learns how (CPython 3.11).
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, number)

    async def stop(self, *, timeout_s: float) -> None:
        """Ask with SIGTERM, insist with SIGKILL."""
        self.signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(timeout_s):
                await self.process.wait()
        except TimeoutError:
            self.signal(signal.SIGKILL)
            await self.process.wait()
        finally:
            if self._ready_fd >= 0:
                os.close(self._ready_fd)
                self._ready_fd = -1
