"""The ledgers of real processes: what they show amid an answer, who may ask, and what SIGUSR1 writes to the log."""

import os
import signal
from pathlib import Path

import pytest
from tests.process.commands_under_test import START_TIMEOUT_S, Command
from tests.process.deployment_under_test import Running
from tests.process.test_serve_command import process_of

from pdserve.launch.deployment import require_free_port

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_ledgers_amid_an_answer_name_its_owners_and_are_empty_after_it(
    apart: Running, text_ids: list[int]
) -> None:
    stream = await apart.stream(text_ids[:70], max_tokens=2000)
    await anext(stream)
    (request,) = (await apart.ledger())["requests"]
    (work,) = request["works"]
    assert (request["phase"], work["worker_id"]) == ("answering", "decode-0")
    ledger = await apart.ledger(worker="decode-0")
    (rank,) = ledger["ranks"]
    owners = {entry["owner"]: entry for entry in rank["owners"]}
    choice = owners[f"choice 0 of request {work['attempt_id']}"]
    assert (choice["phase"], choice["place"]) == ("scheduled", "running")
    num_pages = sum(stop - start for start, stop in choice["pages"])
    assert num_pages == rank["num_pages"] - rank["num_free_pages"] > 0
    (session,) = ledger["sessions"]
    assert (session["peer"], session["phase"], session["age_s"] > 0) == ("prefill-0", "connected", True)
    await stream.close()
    await apart.until_idle()
    for worker in ("prefill-0", "decode-0"):
        idle = await apart.ledger(worker=worker)
        assert [(rank["owners"], rank["shared"]) for rank in idle["ranks"]] == [([], [])]
        assert await apart.metric("pdserve:ledger_leaked", worker=worker) == 0
    assert await apart.metric("pdserve:ledger_leaked") == 0


async def test_ledgers_ask_for_the_cluster_secret(apart: Running) -> None:
    urls = [apart.url, *(worker["url"] for worker in (await apart.workers()).values())]
    for url in urls:
        async with apart.session.get(f"{url}/debug/ledger") as response:
            assert response.status == 401


async def test_user_signal_writes_the_ledger_to_the_log_and_disturbs_nothing(tmp_path: Path) -> None:
    port = str(require_free_port("127.0.0.1", 0))
    command = await Command.start(tmp_path, "serve", "--port", port, "--kv-tokens", "2048", "--colocated", "1")
    try:
        await command.until_says("ready:", timeout_s=START_TIMEOUT_S)
        os.kill(process_of(command, "worker"), signal.SIGUSR1)
        await command.until_says("ledger_rank dp_rank=0 num_free_pages=")
        os.kill(process_of(command, "gateway"), signal.SIGUSR1)
        await command.until_says("ledger_lease peer=")
        assert command.is_running and "Traceback" not in command.stderr
    finally:
        await command.end()
