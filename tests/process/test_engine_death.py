"""Every way in which ranks, or their main process, can die: the dead one is named, and nobody is left."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.process.engine_under_test import (
    DEADLINE_S,
    listening_addresses,
    long_batch,
    running,
    spec_of,
    ticks,
    write_nine_heads,
)

from pdserve.engine.client import RankEngine, start_engine
from pdserve.errors import InternalError

NUM_RANKS = 3


@pytest.fixture(scope="module")
def nine_heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model_dir = tmp_path_factory.mktemp("nine-heads")
    write_nine_heads(model_dir, num_layers=8)
    return model_dir


@pytest.fixture
def temporary_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where ranks put what they do not put elsewhere."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def is_empty(folder: Path) -> bool:
    return list(folder.iterdir()) == []


def ended_by_kill(rank: int, pid: int) -> str:
    return rf"rank {rank} \(process {pid}\) ended by SIGKILL"


@asynccontextmanager
async def all_end(pids: Sequence[int]) -> AsyncGenerator[None]:
    """Within the deadline after the body. A pidfd is readable once its process has ended, whoever its parent is."""
    loop = asyncio.get_running_loop()
    handles = [os.pidfd_open(pid) for pid in pids]
    ended = [asyncio.Event() for _ in pids]
    for handle, event in zip(handles, ended, strict=True):
        loop.add_reader(handle, event.set)
    try:
        yield
        await asyncio.wait_for(asyncio.gather(*(event.wait() for event in ended)), DEADLINE_S)
    finally:
        for handle in handles:
            loop.remove_reader(handle)
            os.close(handle)


@pytest.mark.parametrize("dead_rank", [0, 2])
async def test_rank_killed_in_a_pass_is_named_and_ends_the_others(
    dead_rank: int, nine_heads: Path, temporary_dir: Path
) -> None:
    async with running(nine_heads, tensor_parallel_size=NUM_RANKS) as engine, all_end(engine.info.pids):
        pid = engine.info.pids[dead_rank]
        started = asyncio.create_task(engine.run(long_batch(0)))
        while ticks(engine) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(InternalError, match=ended_by_kill(dead_rank, pid)):
            await asyncio.wait_for(started, DEADLINE_S)
        with pytest.raises(InternalError, match=ended_by_kill(dead_rank, pid)):
            await engine.run(long_batch(1))
    assert is_empty(temporary_dir)


async def test_rank_killed_between_passes_is_noticed_without_one(nine_heads: Path) -> None:
    async with running(nine_heads, tensor_parallel_size=NUM_RANKS) as engine, all_end(engine.info.pids):
        await engine.run(long_batch(0))
        watching = asyncio.create_task(engine.wait_failed())
        os.kill(engine.info.pids[1], signal.SIGKILL)
        with pytest.raises(InternalError, match=ended_by_kill(1, engine.info.pids[1])):
            await asyncio.wait_for(watching, DEADLINE_S)
        with pytest.raises(InternalError, match=ended_by_kill(1, engine.info.pids[1])):
            await engine.run(long_batch(1))


def own_children() -> list[int]:
    """In the order in which they were started."""
    return sorted(int(pid) for pid in Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split())


async def started_ranks(starting: "asyncio.Task[RankEngine]") -> list[int]:
    """The processes of a start that goes on, by rank."""
    before = own_children()
    while len(pids := [pid for pid in own_children() if pid not in before]) < NUM_RANKS:
        assert not starting.done()
        await asyncio.sleep(0.001)
    return pids


async def test_rank_killed_while_loading_is_named(nine_heads: Path, temporary_dir: Path) -> None:
    starting = asyncio.create_task(start_engine(spec_of(nine_heads, tensor_parallel_size=NUM_RANKS)))
    pids = await started_ranks(starting)
    async with all_end(pids):
        os.kill(pids[1], signal.SIGKILL)
        with pytest.raises(InternalError, match=ended_by_kill(1, pids[1])):
            await asyncio.wait_for(starting, DEADLINE_S)
    assert is_empty(temporary_dir)


async def test_rank_killed_while_the_others_wait_for_it_is_named(nine_heads: Path, temporary_dir: Path) -> None:
    """A rank that listens has loaded torch, and waits for the one that stands still."""
    starting = asyncio.create_task(start_engine(spec_of(nine_heads, tensor_parallel_size=NUM_RANKS)))
    pids = await started_ranks(starting)
    os.kill(pids[1], signal.SIGSTOP)
    async with all_end(pids):
        async with asyncio.timeout(DEADLINE_S):
            while not all(listening_addresses([pids[rank]]) for rank in (0, 2)):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        os.kill(pids[1], signal.SIGKILL)
        with pytest.raises(InternalError, match=ended_by_kill(1, pids[1])):
            await asyncio.wait_for(starting, DEADLINE_S)
    assert is_empty(temporary_dir)


async def test_start_that_is_given_up_leaves_no_rank(nine_heads: Path) -> None:
    starting = asyncio.create_task(start_engine(spec_of(nine_heads, tensor_parallel_size=NUM_RANKS)))
    async with all_end(await started_ranks(starting)):
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting


async def test_pass_that_is_given_up_ends_the_ranks(nine_heads: Path) -> None:
    async with running(nine_heads, tensor_parallel_size=NUM_RANKS) as engine, all_end(engine.info.pids):
        started = asyncio.create_task(engine.run(long_batch(0)))
        await asyncio.sleep(0)
        started.cancel()
        with pytest.raises(asyncio.CancelledError):
            await started
        with pytest.raises(InternalError, match="pass 0 was abandoned"):
            await engine.run(long_batch(1))


async def test_ranks_of_a_killed_worker_do_not_outlive_it(nine_heads: Path) -> None:
    script = (
        "import asyncio\n"
        "from pathlib import Path\n"
        "from tests.process.engine_under_test import long_batch, running\n"
        "async def main():\n"
        f"    async with running(Path({str(nine_heads)!r}), tensor_parallel_size={NUM_RANKS}) as engine:\n"
        "        print(*engine.info.pids, flush=True)\n"
        "        for pass_index in range(10**6):\n"
        "            await engine.run(long_batch(pass_index))\n"
        "asyncio.run(main())\n"
    )
    worker = await asyncio.create_subprocess_exec(sys.executable, "-c", script, stdout=subprocess.PIPE)
    assert worker.stdout is not None
    pids = [int(pid) for pid in (await asyncio.wait_for(worker.stdout.readline(), DEADLINE_S)).split()]
    async with all_end(pids):
        worker.kill()
        await worker.wait()


async def test_rank_that_stands_still_is_killed_on_close(nine_heads: Path) -> None:
    engine = await start_engine(spec_of(nine_heads, tensor_parallel_size=NUM_RANKS))
    os.kill(engine.info.pids[2], signal.SIGSTOP)
    async with all_end(engine.info.pids):
        await asyncio.wait_for(engine.close(), DEADLINE_S)
