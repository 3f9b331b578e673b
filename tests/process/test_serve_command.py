"""`pdserve serve` from its first line to its end, however it ends: nothing stays behind."""

import asyncio
import os
import re
import shlex
import shutil
import signal
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
from tests.process.commands_under_test import START_TIMEOUT_S, Command

from pdserve.launch.deployment import require_free_port

FIRST_WORDS_TIMEOUT_S = 30.0


def shared_files_of(pids: list[int]) -> list[str]:
    """Files in shared memory that carry the number of one of these processes, as those of libfabric do."""
    names = [entry.name for entry in Path("/dev/shm").iterdir()]
    return [name for name in names if {str(pid) for pid in pids} & set(re.findall(r"\d+", name))]


@asynccontextmanager
async def served(folder: Path, *flags: str) -> AsyncGenerator[tuple[Command, str]]:
    """The command and its URL; it has just been started."""
    port = require_free_port("127.0.0.1", 0)
    command = await Command.start(folder, "serve", "--port", str(port), "--kv-tokens", "2048", *flags)
    try:
        yield command, f"http://127.0.0.1:{port}"
    finally:
        await command.end()


def process_of(command: Command, word: str) -> int:
    """The one process of a command that has `word` on its command line."""
    lines = {pid: Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0") for pid in command.descendants()}
    (pid,) = (pid for pid, words in lines.items() if word.encode() in words)
    return pid


async def first_words(command_line: str, *, num_events: int) -> list[str]:
    """The first events of a streamed answer, as a shell's user sees them."""
    process = await asyncio.create_subprocess_exec(
        *shlex.split(command_line), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(FIRST_WORDS_TIMEOUT_S):
            lines = [(await process.stdout.readline()).decode() for _ in range(2 * num_events)]
    finally:
        process.kill()
        await process.communicate()
    return [line for line in lines if line.strip()]


async def test_serve_shows_progress_answers_its_curl_and_ends_whole_with_ctrl_c(tmp_path: Path) -> None:
    async with served(tmp_path, "--provider", "shm") as (command, url):
        await command.until_says("ready:", timeout_s=START_TIMEOUT_S)
        (ready,) = command.stdout.splitlines()
        assert ready.startswith(f"ready: {url} ") and "curl" in ready
        for progress in ("gateway listens on", "prefill-0 is ready", "decode-0 is ready"):
            assert progress in command.stderr
        if shutil.which("curl") is not None:
            events = await first_words(ready[ready.index("curl") :], num_events=5)
            assert len(events) == 5 and all(event.startswith("data: {") for event in events)
        pids = command.descendants()
        assert len(pids) == 6, "the command, its gateway, two workers and their ranks"
        assert shared_files_of(pids)
        command.process.send_signal(signal.SIGINT)
        assert await command.wait() == 0
        assert (command.descendants(), shared_files_of(pids)) == ([], [])
        assert "stopping" in command.stderr and "Traceback" not in command.stderr


@asynccontextmanager
async def streaming(url: str, *, max_tokens: int) -> AsyncGenerator[aiohttp.StreamReader]:
    """An answer that has begun."""
    body = {"model": "default", "prompt": "Once", "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
    async with aiohttp.ClientSession() as session, session.post(f"{url}/v1/completions", json=body) as response:
        assert (await response.content.readline()).startswith(b"data: {")
        yield response.content


async def test_serve_told_to_stop_amid_an_answer_finishes_it(tmp_path: Path) -> None:
    async with served(tmp_path, "--colocated", "1") as (command, url):
        await command.until_says("ready:", timeout_s=START_TIMEOUT_S)
        async with streaming(url, max_tokens=60) as answer:
            command.process.send_signal(signal.SIGINT)
            assert (await answer.read()).endswith(b"data: [DONE]\n\n")
        assert await command.wait() == 0
        assert command.descendants() == []


async def test_serve_told_to_stop_twice_ends_at_once(tmp_path: Path) -> None:
    async with served(tmp_path, "--colocated", "1") as (command, url):
        await command.until_says("ready:", timeout_s=START_TIMEOUT_S)
        async with streaming(url, max_tokens=1500):
            command.process.send_signal(signal.SIGINT)
            await command.until_says("stopping")
            command.process.send_signal(signal.SIGINT)
            assert await command.wait() == 130
            await command.until_gone()


async def test_serve_stopped_while_it_starts_ends_whole(tmp_path: Path) -> None:
    async with served(tmp_path) as (command, _):
        await command.until_says("gateway listens on", timeout_s=START_TIMEOUT_S)
        command.process.send_signal(signal.SIGTERM)
        assert await command.wait() == 0
        assert command.descendants() == []
        assert "Traceback" not in command.stderr


async def test_serve_that_is_killed_takes_all_its_processes_with_it(tmp_path: Path) -> None:
    async with served(tmp_path, "--colocated", "1") as (command, _):
        await command.until_says("ready:", timeout_s=START_TIMEOUT_S)
        assert len(command.descendants()) == 4, "the command, its gateway, a worker and its rank"
        await command.kill()
        await command.until_gone()


async def test_serve_whose_worker_dies_says_so_and_ends_with_1(tmp_path: Path) -> None:
    async with served(tmp_path, "--colocated", "1") as (command, _):
        await command.until_says("colocated-0 is ready", timeout_s=START_TIMEOUT_S)
        os.kill(process_of(command, "worker"), signal.SIGKILL)
        assert await command.wait() == 1
        assert command.descendants() == []
        assert "colocated-0 ended by itself" in command.stderr.splitlines()[-1]
